"""If this failed, the tuner's table and picture would contradict what was measured."""

import csv
import re
from types import SimpleNamespace

import pytest
from test_run_page import Tags
from test_tune import SHAPE, tuned

from architecture import model_stats
from config import command_line, validation
from costs import hardware
from tools.planner.layouts import Rejected
from tools.report import picture
from tools.tuner import report_page, result_tables
from tools.tuner.result_tables import LayoutResult, SearchResult
from tools.tuner.search_space import Candidate
from tools.tuner.trials import Trial


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


def test_the_page_has_what_was_measured_and_why_the_search_stopped(finished):
    out, stored = finished
    page = (out / "report.html").read_text()
    found = Tags(page)
    assert found.open == []
    assert not found.tags & {"script", "iframe", "img", "link"}
    assert all(link.startswith("#") for link in found.links)
    assert len(set(found.ids)) == len(found.ids)
    assert set(re.findall(r"https?://[\w.]+", page)) == {"http://www.w3.org"}
    words = " ".join(found.texts)
    ran = {trial["key"] for trial in stored if trial["status"] == "ok"}
    assert "Every layout has been measured." in words
    assert f"{len(ran)} of {len(ran)} layouts were tried." in words
    assert "Measured over predicted: median" in words
    assert "train.py" in words
    assert {"predicted seconds of an iteration", "measured", "fastest"} <= {*found.texts}
    with open(out / "results.csv", newline="") as file:
        best, *_ = csv.DictReader(file)
    seconds = result_tables.format_number(float(best["sec_per_it"]))
    predicted = result_tables.format_number(float(best["predicted_sec"]))
    cells = found.texts[found.texts.index("measured / predicted") :]
    first = next(n for n, text in enumerate(cells) if text.startswith("1. "))
    assert cells[first + 1 : first + 3] == [seconds, predicted]


def test_the_page_says_what_was_not_measured_and_escapes_what_it_shows(finished):
    """A search that its budget ended: the nearest layout, scaled by the planner's error."""
    _, stored = finished
    candidates = []
    for trial in stored[:3]:
        config = command_line.build(
            {k: v for g in ("model",) for k, v in trial["config"][g].items()} | {"steps": 1}
        )
        label = f"{trial['label']} <b>&"
        candidates.append(SimpleNamespace(key=trial["key"], label=label, ranks=8, config=config))
    for candidate, seconds in zip(candidates, (0.5, 0.8, 1.0)):
        candidate.prediction = SimpleNamespace(seconds=seconds)
    own = [Trial(**stored[0] | {"seconds": [0.25] * 3}), Trial(**stored[1] | {"status": "oom"})]
    reasons = [Rejected({"tp": n}, f"tp({n}) does not divide <script>") for n in (3, 5)]
    result = SearchResult(
        own,
        candidates,
        reasons,
        hardware.load("cpu"),
        "the budget of 2 is spent",
        lambda c: ["<x>"],
        "<title>",
    )
    page = report_page.page(result)
    found = Tags(page)
    assert not found.tags & {"script", "b", "x"}
    words = " ".join(found.texts)
    assert "The budget of 2 is spent." in words
    assert "2 of 3 layouts were tried." in words
    nearest = f"{candidates[2].label} has the fewest predicted seconds: 0.5 s"
    assert nearest in words, "1.0 s, by the factor 0.25 / 0.5"
    assert "failed" in found.texts
    assert "Rejected without a run: 2" in words
    cells = found.texts[found.texts.index("why, of one of them") :]
    assert "2" in cells[:3], "both for one reason"


def test_the_picture_has_every_layout_that_ran(finished):
    out, stored = finished
    text = (out / "layouts.svg").read_text()
    for words in ("GB on the fullest rank", "tokens/s", "measured", "front", "on 8 ranks"):
        assert words in text
    ran = {trial["key"] for trial in stored if trial["status"] == "ok"}
    assert text.count(f"fill: {picture.COLORS['measured']}") >= len(ran) > 2
    assert "http-equiv" not in text
