"""The emulator: if this failed, the emulated seconds of a step would not be those of its parts."""

import json
import subprocess
import sys

import pytest
import torch
from ranks import ROOT

from config.command_line import parse
from config.messages import UserError
from config.schema import Layout
from config.validation import check
from emulator.emulation import AFTER, StageMeasured, StageSeconds, composed, priced
from emulator.recording import (
    Ledger,
    MachineLinks,
    MeasuredLinks,
    Operation,
    StandInGroup,
    emulated_context,
    interpolated,
)
from planner import hardware, op_costs, time_terms
from planner.job import Job
from schedules.orders import build

# ---- Stand-ins -----------------------------------------------------------------------------------


def test_stand_ins_have_the_shapes_and_the_ranks_own_values():
    group = StandInGroup((4, 6, 8, 10), 1, "tp", ledger := Ledger())
    own = torch.arange(8.0)
    group.all_reduce(own).wait()
    assert own.tolist() == list(range(8)), "left as it is"
    part, whole = torch.empty(2, 3), torch.arange(24.0).view(8, 3)
    group.reduce_scatter(part, whole).wait()
    assert torch.equal(part, whole[2:4])
    joined = torch.empty(8, 3)
    group.all_gather(joined, part).wait()
    assert torch.equal(joined, part.repeat(4, 1))
    weights = torch.arange(8.0)
    group.all_gather(weights, weights[2:4]).wait()
    assert weights.tolist() == list(range(8)), "gathered in place: the others' are there"
    ranks = (4, 6, 8, 10)
    taken, seconds = ledger.take()
    assert taken == [
        Operation("all_reduce", "tp", ranks, 32),
        Operation("reduce_scatter", "tp", ranks, 96),
        Operation("all_gather", "tp", ranks, 96),
        Operation("all_gather", "tp", ranks, 32),
    ]
    assert seconds > 0
    assert ledger.take() == ([], 0.0)


def test_what_arrives_is_finite_and_not_denormal():
    for role in ("forward", "backward"):
        group, buffer = StandInGroup((0, 1), 0, role, Ledger()), torch.full((64, 8), torch.nan)
        group.receive(buffer, 1).wait()
        assert torch.isfinite(buffer).all()
        assert buffer.abs().median() > 1e-4
        assert len(buffer.unique()) > 500


def test_a_group_of_one_crosses_nothing():
    context = emulated_context(4, 3, torch.device("cpu"))
    group = context.group([(0, 1)], "tied")
    assert (group.ranks, group.size) == ((3,), 1)
    group.all_reduce(torch.ones(2)).wait()
    output = torch.empty(2)
    group.all_gather(output, torch.ones(2)).wait()
    assert output.tolist() == [1, 1]
    assert context.ledger.take()[0] == []


# ---- Links ---------------------------------------------------------------------------------------

HEAD = "group,together,ranks,groups,operation,bytes,trials,median_s\n"


def test_measured_operations_are_interpolated(tmp_path):
    file = tmp_path / "allreduce.csv"
    rows = ["tp,False,2,1,all-reduce,1000,9,0.001", "tp,True,2,2,all-reduce,1000,9,0.002"]
    rows += ["dp,True,2,2,all-reduce,1000,9,0.004", "tp,True,2,2,all-reduce,100000,9,0.3"]
    rows += ["world,False,4,1,p2p,1000,9,0.005"]
    file.write_text(HEAD + "\n".join(rows) + "\n")
    alone, beside = MeasuredLinks(2, str(file)), MeasuredLinks(4, str(file))
    assert alone.seconds(Operation("all_reduce", "tp", (0, 1), 500)) == 0.001, "the shortest"
    assert alone.seconds(Operation("all_reduce", "tp", (0, 1), 2000)) == pytest.approx(0.002)
    middle = beside.seconds(Operation("all_reduce", "tp", (0, 1), 10000))
    assert middle == pytest.approx((0.003 * 0.3) ** 0.5), "of both kinds of group, and the mean"
    assert beside.seconds(Operation("send", "forward", (0, 1), 1000)) == 0.005
    with pytest.raises(UserError, match="no all-reduce of 3 ranks"):
        beside.seconds(Operation("all_reduce", "tp", (0, 1, 2), 8))
    with pytest.raises(UserError, match=r"none\.csv is not benchmarks/allreduce\.py's"):
        MeasuredLinks(2, str(tmp_path / "none.csv"))
    assert interpolated([(10, 1.0), (1000, 100.0)], 100) == pytest.approx(10.0)


def test_a_machines_links_are_the_planners():
    machine = hardware.load("a100-80")
    links = MachineLinks(machine, Layout(tp=4, pp=2, dp=2))
    whole = links.seconds(Operation("all_reduce", "tp", (4, 5, 6, 7), 2**20))
    assert whole == op_costs.all_reduce(machine.nvlink, 4, 2.0**20)
    half = links.seconds(Operation("all_gather", "dp", (0, 4), 2**20))
    assert half == op_costs.all_reduce(op_costs.ring(machine, 2, 4), 2, 2.0**20) / 2
    sent = links.seconds(Operation("send", "forward", (0, 8), 2**20))
    assert sent == op_costs.message(machine, 8, 2.0**20)


# ---- Composing -----------------------------------------------------------------------------------


def stage(forward: float, backward: float, **more) -> StageSeconds:
    return StageSeconds({"F": forward, "B": backward}, {"F": 0.0, "B": 0.0}, **more)


def test_a_pipelines_step_is_that_of_its_schedule():
    """Two stages, two micro-batches, by hand: F0 F1 on stage 0, then each waits for the other."""
    two = [stage(1.0, 2.0, after=0.5), stage(3.0, 4.0, after=0.25)]
    step = composed(build("1f1b", 2, 2), two, transfer=0.125)
    # Stage 1: F0 from 1.125 to 4.125, B0 to 8.125, F1, B1 to 15.125; stage 0: B1 after a message.
    assert step.parts["pipeline"] == pytest.approx(15.125 + 0.125 + 2.0)
    assert step.seconds == pytest.approx(17.25 + 0.5)


def test_reductions_and_gathering_hide_only_where_the_device_does_both():
    one = [stage(1.0, 2.0, after=0.5, reduce=3.0, buckets=6, gather=1.5, others=0.25)]
    schedule = build("1f1b", 1, 2)
    assert composed(schedule, one, 0.0).seconds == pytest.approx(6 + 3 + 0.25 + 0.5 + 1.5)
    hidden = composed(schedule, one, 0.0, hides=True)
    assert hidden.seconds == pytest.approx(6 + (3 - 2) + 0.25 + 0.5 + 1.5)
    overlapped = composed(schedule, one, 0.0, hides=True, overlap=True)
    assert overlapped.seconds == pytest.approx(6 + 1 + 0.25 + 0.5 + 0.5)
    short = [stage(1.0, 2.0, after=0.5, reduce=1.2, buckets=6)]
    assert composed(schedule, short, 0.0, hides=True).parts["reduce"] == pytest.approx(0.2)


def test_operations_are_priced_where_they_belong():
    pair, all_ = (0, 1), (0, 1, 2, 3)
    own = StageMeasured(0, 0, "4 CPU cores", 1, {"F": 1.0, "B": 2.0, AFTER: 0.5})
    own.operations["F"] = [Operation("all_reduce", "tp", pair, 1)] * 2
    own.operations["F"] += [Operation("send", "forward", pair, 1)]
    own.operations["B"] = [Operation("all_reduce", "tp", pair, 1)]
    own.operations["B"] += [Operation("reduce_scatter", "replicas", pair, 1)] * 3
    own.operations[AFTER] = [Operation("all_reduce", "world", all_, 1)]
    own.operations[AFTER] += [Operation("all_gather", "replicas", pair, 1)]
    found = priced(own, lambda operation: 0.125, rounds=2)
    assert found.actions == {"F": 1.25, "B": 2.125}
    assert found.crossing == {"F": 0.25, "B": 0.125}
    assert (found.reduce, found.buckets) == (0.75, 6)
    assert (found.others, found.gather, found.after) == (0.125, 0.125, 0.5)


# ---- The command ---------------------------------------------------------------------------------

SHAPE = "--layers 4 --hidden 32 --heads 4 --seq-length 32 --vocab-size 64"
SHAPE += " --global-batch-size 8 --micro-batch-size 1"


def run(program: str, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, program, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_step_is_emulated_with_calibrated_links(tmp_path):
    out, links = tmp_path / "out.json", tmp_path / "links.toml"
    links.write_text('device = "CPU"\n[nvlink]\nalpha = 1e-4\nbeta = 1e9\n')
    words = [*SHAPE.split(), "--tp", "2", "--pp", "2"]
    files = ["--json", str(out), "--calibration", str(links)]
    done = run("rehearse.py", "--on", "cpu", "--gpus", "8", *words, *files)
    assert done.returncode == 0, done.stderr
    assert "8 ranks, of which 0, 4 were run in turn" in done.stdout
    answer = json.loads(out.read_text())
    assert answer["seconds"] == pytest.approx(sum(answer["parts"].values()))
    assert answer["tokens_per_second"] == pytest.approx(8 * 32 / answer["seconds"])
    for row in answer["stages"]:
        # Two blocks, two all-reduces each, of 32 x 32 numbers in fp32, and the embedding's or
        # those of the loss: 2 alpha and more.
        assert row["crossing"]["F"] > 4 * 2 * 1e-4
        assert row["actions"]["F"] > row["crossing"]["F"]
        assert row["actions"]["B"] > row["crossing"]["B"] > 0
        assert row["reduce"] > 2e-4
        assert min(row["after"], row["gather"], row["others"], row["bytes"]) > 0
    edge = 4 * (4 * 32 * 32) / 1e9  # all ranks of a stage over the network, as plan.py has it
    assert answer["transfer"] == pytest.approx(1e-4 + edge)


def test_ranks_of_cp_gather_what_the_planner_prices(tmp_path):
    """Keys and values, and their gradients."""
    out, words = tmp_path / "out.json", f"{SHAPE} --kv-heads 1 --cp 2 --steps 1 --precision bf16"
    done = run("rehearse.py", "--on", "cpu", "--gpus", "2", *words.split(), "--json", str(out))
    assert done.returncode == 0, done.stderr
    (stage,) = json.loads(out.read_text())["stages"]
    config = check(parse(words.split()), 2)
    job = Job(config.model, config.layout, config.training, hardware.load("cpu"))
    for kind in "FB":
        assert stage["crossing"][kind] == pytest.approx(4 * time_terms.gathered(job))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--on", "cpu", "--zero", "3", "--gpus", "2"], "does not emulate --zero 3"),
        (["--on", "cpu", "--gpu", "a100-80"], "has 'A100', and here is 'CPU': give --gpu cpu"),
        (["--on", "cpu", "--all-ranks"], "--all-ranks is about operations: --on runs one rank"),
        (["--links", "x.csv"], "--links is about seconds"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence):
    done = run("rehearse.py", *SHAPE.split(), "--precision", "fp32", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
