"""If this failed, the tuner's table and picture would contradict what was measured."""

import csv
from types import SimpleNamespace

import pytest
from test_tune import SHAPE, tuned

from config import command_line, model_stats, validation
from planner import picture
from tuner import result_tables
from tuner.result_tables import LayoutResult
from tuner.search_space import Candidate


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    words = ["--try", "micro-batch-size=1,2", "--schedule", "1f1b", "--zero", "1", "--all"]
    done, stored = tuned(out, *words, "--partition", "balanced")
    assert done.status == 0, done.err
    return out, stored


def test_every_row_of_the_results_agrees_with_itself(finished):
    out, stored = finished
    with open(out / "results.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len({t["key"] for t in stored})
    seconds = [float(row["sec_per_it"]) for row in table]
    assert seconds == sorted(seconds)
    model = command_line.parse(SHAPE.split()).model
    for row in table:
        assert (row["status"], row["gpu"], row["precision"]) == ("ok", "cpu", "fp32")
        assert int(row["tp"]) * int(row["pp"]) * int(row["dp"]) == int(row["gpus"]) == 8
        assert (row["layers"], row["hidden"], row["seq"], row["gbs"]) == ("4", "64", "16", "16")
        flops = model_stats.hardware_flops(model, 16, row["recompute"], row["formula"])
        rate = flops / float(row["sec_per_it"]) / 8 / 1e12
        assert float(row["tflops"]) == pytest.approx(rate, rel=1e-4)
        assert float(row["size_b"]) == pytest.approx(model_stats.parameters(model) / 1e9, rel=1e-4)


def test_the_notes_of_a_row_have_the_options_without_a_column():
    """With cp the label has a word between those of the columns."""
    words = f"{SHAPE} --steps 1 --tp 2 --cp 2 --dp 2 --zero 1 --micro-batch-size 1 --schedule 1f1b"
    candidate = Candidate(validation.check(command_line.parse(words.split()), 8), None)
    trial = SimpleNamespace(status="failed", started="2026-11-26")
    result = SimpleNamespace(machine=SimpleNamespace(node=8))
    row = result_tables._markdown_row(LayoutResult(candidate, [trial], []), result)
    assert row[2:6] == ["2", "2", "1", "1"], "dp, tp, pp and micro-batch size"
    assert row[-1].startswith("cp2 zero1; "), row[-1]


def test_the_picture_has_every_layout_that_ran(finished):
    out, stored = finished
    text = (out / "layouts.svg").read_text()
    for words in ("GB on the fullest rank", "tokens/s", "measured", "front", "on 8 ranks"):
        assert words in text
    ran = {trial["key"] for trial in stored if trial["status"] == "ok"}
    assert text.count(f"fill: {picture.COLORS['measured']}") >= len(ran) > 2
    assert "http-equiv" not in text
