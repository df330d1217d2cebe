"""check.py --cluster: if this failed, a cluster's first day would end without its page, or the page
would say that all is well where it is not.
"""

import json
import sys

import pytest
from ranks import Job, mpirun, srun_command, start

from config.schema import Layout
from tools.checker.card import killed_result, layouts_result, network_result, page, verdict
from tools.checker.cluster_worker import row_of
from tools.checker.compare import Difference
from tools.checker.engine import Outcome

WORDS = ["check.py", "--cluster", "--device", "cpu", "--minutes", "9", "--line-rate", "10"]


def read_parts(out) -> dict:
    """The parts of a card by name."""
    return json.loads((out / "card.json").read_text())["parts"]


def check_page(out, ranks: int, nodes: str) -> None:
    """The page and its data have all seven parts, as they should be."""
    card = json.loads((out / "card.json").read_text())
    parts = card["parts"]
    names = ["network", "layouts", "straight", "killed", "resumed", "known", "model"]
    assert list(parts) == names
    assert {part["status"] for part in parts.values()} == {"as it should"}, verdict(card)
    assert len(parts["layouts"]["found"]) == 12
    assert parts["killed"]["found"]["named"] == [ranks - 1]
    resumed = parts["resumed"]["found"]
    assert (resumed["to"], resumed["off"] < 1e-5) == (60, True)
    known = parts["known"]["found"]
    assert known["verdict"] == "equal"
    assert "equal to rounding: this is the known run, in 40 of 240 steps" in known["text"]
    model = parts["model"]["found"]
    assert model["tokens_per_second"] > 0 < model["planned"]["seconds"]
    assert len(model["places"]) == ranks
    text = (out / "card.md").read_text()
    assert text.startswith("# Trine ")
    assert f"on {ranks} ranks of {nodes}" in text
    assert "7 of 7 parts are as they should be" in text


@pytest.mark.slow
def test_under_mpirun_all_parts_are_on_the_page(tmp_path):
    outcome = mpirun(2, *WORDS, "--out", str(tmp_path), timeout=900)
    assert outcome.status == 0, outcome.out + outcome.err
    check_page(tmp_path, 2, "one node")
    rows = read_parts(tmp_path)["network"]["found"]["rows"]
    assert {row["percent_of_line"] for row in rows} == {"-"}, "no group crosses nodes"


@pytest.mark.slow
def test_under_srun_groups_cross_the_nodes(tmp_path, slurm):
    """The parts that another node makes different: the network, and who is named."""
    command = [*srun_command(4, "--ntasks-per-node=2"), sys.executable, *WORDS]
    command += ["--parts", "network,killed"]
    with Job([*command, "--out", str(tmp_path)], tmp_path) as job:
        assert job.status(900) == 0, job.text
    text, parts = (tmp_path / "card.md").read_text(), read_parts(tmp_path)
    assert "on 4 ranks of 2 nodes" in text
    assert "2 of 2 parts are as they should be" in text
    assert parts["killed"]["found"]["named"] == [3]
    rows = parts["network"]["found"]["rows"]
    crossing = {(row["group"], row["crosses"]) for row in rows}
    assert crossing == {("world", True), ("tp", False), ("dp", True)}
    assert all((row["percent_of_line"] != "-") == row["crosses"] for row in rows)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--minutes", "0"], "--minutes is a number above 0, not 0"),
        (["--parts", "network,speed"], "not 'speed'"),
        (["--parts", "resumed"], "the part resumed needs the parts straight and killed"),
        (["--parts", "network", "--gpu", "h100"], "--gpu is for the part model"),
        (["--parts", "model", "--line-rate", "9"], "--line-rate is for the part network"),
        (["--layouts", "3"], "unrecognized arguments: --layouts 3"),
        ([], "one rank is no cluster: start check.py --cluster with srun or mpirun"),
    ],
    ids=["minutes", "part", "resumed", "gpu", "line rate", "another check's", "alone"],
)
def test_a_mistake_is_one_sentence(words, sentence):
    outcome = start([sys.executable, "check.py", "--cluster", *words])
    assert outcome.status == 2
    assert sentence in outcome.err
    assert len(outcome.err.splitlines()) == 1


def card_of(**parts) -> dict:
    about = {"version": "1", "date": "", "ranks": 4, "nodes": 1, "launcher": "mpirun"}
    return {"about": about | {"torch": "2", "cuda": None}, "parts": parts}


def test_what_is_wrong_is_on_the_page(tmp_path):
    rows = [
        {"layout": "tp 2", "differs": "", "off": 0.0},
        {"layout": "dp 2", "differs": "losses of step 1: 2 for 1", "off": 1.0},
    ]
    (tmp_path / "layouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    part = layouts_result(tmp_path) | {"seconds": 1.0}
    assert part["status"] == "different"
    card = card_of(layouts=part)
    assert verdict(card) == "layouts: different (dp 2: losses of step 1: 2 for 1)"
    assert "* dp 2: losses of step 1: 2 for 1, losses 1.0e+00 off" in list(page(card))


def test_a_layout_that_differs_has_its_first_tensor_on_the_page():
    layout = Layout(tp=2, dp=1, micro_batch_size=2, pad_vocab_multiple=1)
    part = Difference((1, "output", "blocks.0.attention.qkv"), [], None)
    row = row_of(Outcome(layout, part), float("nan"))
    assert row["differs"] == "step 1, the output of blocks.0.attention.qkv"
    assert (row["layout"], row["off"]) == ("tp 2", None)
    assert row_of(Outcome(layout), 0.0)["differs"] == ""


def test_slow_links_of_gpus_are_wrong_and_of_busy_cores_are_named(tmp_path):
    found = {"rows": [], "line_rate": None, "pairs": [["n1", "n2", 1e9]], "slow": ["slow link: x"]}
    (tmp_path / "network.json").write_text(json.dumps(found))
    assert network_result(tmp_path, "cuda")["status"] == "slow links"
    part = network_result(tmp_path, "cpu") | {"status": "as it should", "seconds": 1.0}
    assert "* slow link: x" in list(page(card_of(network=part)))


@pytest.mark.parametrize(
    ("culprits", "statuses", "status"),
    [
        ([3], [1, 1, 1, -9], None),
        ([1], [1, 1, 1, -9], "another is named"),
        ([3], [0, 1, 1, -9], "not ended"),
        ([3], [0, 0, 0, 0], "not killed"),
    ],
    ids=["right", "another", "goes on", "too late"],
)
def test_a_kill_is_judged_by_who_is_named(tmp_path, culprits, statuses, status):
    out = tmp_path / "killed"
    (out / "hang").mkdir(parents=True)
    case = {"kind": "dead", "culprits": culprits}
    (out / "hang" / "case.json").write_text(json.dumps(case))
    row = {"iteration": 7, "loss": 1.0, "grad_norm": 1.0}
    (out / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    part = killed_result(tmp_path, 3, statuses)
    assert part.get("status") == status
