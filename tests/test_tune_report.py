"""If this failed, the tuner's table and picture would contradict what was measured."""

import csv

import pytest
from test_tune import SHAPE, tuned

from config import command_line, model_stats
from planner import picture


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


def test_the_picture_has_every_layout_that_ran(finished):
    out, stored = finished
    text = (out / "layouts.svg").read_text()
    for words in ("GB on the fullest rank", "tokens/s", "measured", "front", "on 8 ranks"):
        assert words in text
    ran = {trial["key"] for trial in stored if trial["status"] == "ok"}
    assert text.count(f"fill: {picture.COLORS['measured']}") >= len(ran) > 2
    assert "http-equiv" not in text
