"""--expect: if this failed, a run that leaves its expected curve would not say so."""

import json
import re
from types import SimpleNamespace

import pytest
from observed_steps import observed_step

from base.errors import UserError
from checkpointing.state import Progress
from corpora.usage import Usage
from telemetry.expected_curve import SMOOTH, ExpectedCurve, read
from tools.numerics import table

TOKENS = 64  # of a step of observed_step


def write_curve(path, low=(4.0, 3.0), high=(5.0, 4.0), tokens=(0, 100 * TOKENS)):
    path.write_text(json.dumps({"tokens": tokens, "low": low, "high": high}))
    return path


def test_the_curve_of_another_run_is_noted(tmp_path):
    path = tmp_path / "curve.json"
    curve = {"tokens": [640, 6400], "low": [4.0, 3.0], "high": [5.0, 4.0], "parameters": 1000}
    path.write_text(json.dumps(curve))
    assert read(str(path)).notes(1000, 6400) == []
    (other,) = read(str(path)).notes(2000, 6400)
    assert "a model of 1,000 parameters; this one has 2,000" in other
    (longer,) = read(str(path)).notes(1000, 12800)
    assert "is about 6,400 tokens; this run has 12,800" in longer
    (short,) = read(str(path)).notes(1000, 320)
    assert "begins after 640 tokens; this run ends after 320, and no step of it" in short
    run = tmp_path / "run"
    run.mkdir()
    rows = [json.dumps({"loss": 4.0, "consumed_tokens": 64 * i}) for i in range(1, 101)]
    (run / "metrics.jsonl").write_text("\n".join(rows))
    assert read(str(run)).notes(1000, 6400) == []
    (run / "run.json").write_text(json.dumps({"parameters": 7}))
    assert "a model of 7 parameters; this one has 1,000" in read(str(run)).notes(1000, 6400)[0]


def observe(tmp_path, path, losses):
    """The lines of the log for these losses, one a step."""
    lines: list[str] = []
    log = SimpleNamespace(is_writer=True, note=lines.append)
    observer = ExpectedCurve(str(path), str(tmp_path), log, 1000, 100 * TOKENS)
    for iteration, loss in enumerate(losses, 1):
        usage = Usage(tokens=iteration * TOKENS)
        step = observed_step(iteration, done=Progress(iteration, iteration * 4, 0, usage))
        observer.after_step(step, SimpleNamespace(loss=loss))
    observer.at_exit()
    return lines


def test_leaving_the_band_and_coming_back_are_a_line_each(tmp_path):
    curve = write_curve(tmp_path / "curve.json")
    losses = [4.4] * 20 + [9.0] * 20 + [3.9] * 40
    left, back = observe(tmp_path, curve, losses)
    step = int(re.search(r"step (\d+)", left)[1])
    # The mean of ten steps is above the upper edge, 5 - step / 100, with the first one or two.
    assert step in (21, 22)
    assert "the loss left the band of" in left
    low, high = (float(x) for x in re.search(r"expected (\S+) to (\S+)$", left).groups())
    assert (low, high) == pytest.approx((4 - step / 100, 5 - step / 100), abs=1e-3)
    assert "is back in the band" in back
    rows = [json.loads(line) for line in (tmp_path / "expected.jsonl").open()]
    assert [row["outside"] for row in rows] == [True, False]
    assert rows[0]["iteration"] == step


def test_a_run_on_its_curve_writes_nothing(tmp_path):
    assert observe(tmp_path, write_curve(tmp_path / "curve.json"), [4.2] * 60) == []
    assert not (tmp_path / "expected.jsonl").exists()


def test_one_high_loss_is_no_reason_and_a_nan_is_left_out(tmp_path):
    losses = [4.2] * 20 + [6.0, float("nan")] + [4.2] * 20
    assert observe(tmp_path, write_curve(tmp_path / "curve.json"), losses) == []


def test_after_the_end_of_the_curve_nothing_is_expected(tmp_path):
    curve = write_curve(tmp_path / "curve.json", tokens=(0, 20 * TOKENS))
    (note,) = observe(tmp_path, curve, [3.9] * 20 + [9.0] * 30)
    assert note.startswith("note: --expect"), "the curve is shorter than the run"


def test_the_curve_of_a_run_is_its_losses_with_how_far_they_vary(tmp_path):
    losses = [5 - i / 100 + 0.2 * (-1) ** i for i in range(100)]
    rows = [{"loss": loss, "consumed_tokens": (i + 1) * TOKENS} for i, loss in enumerate(losses)]
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert observe(tmp_path, run, losses) == []
    lines = observe(tmp_path, run, [loss + 1.0 for loss in losses])
    assert len(lines) == 1
    assert f"step {SMOOTH}: the loss left the band" in lines[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "needs lists of numbers of one length"),
        ('{"tokens": [1, 2], "low": [1], "high": [2, 3]}', "needs lists of numbers"),
        ('{"tokens": [2, 1], "low": [1, 1], "high": [2, 3]}', "its tokens are two numbers or more"),
        ('{"tokens": [1, "x"], "low": [1, 1], "high": [2, 3]}', "needs lists of numbers"),
        ("{", "is no JSON"),
    ],
)
def test_a_file_without_a_curve_is_a_sentence(text, message, tmp_path):
    path = tmp_path / "curve.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read(str(path))


def test_a_file_that_is_missing_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="--expect: cannot read"):
        read(str(tmp_path / "none.json"))
    with pytest.raises(UserError, match=r"cannot read .*metrics\.jsonl"):
        read(str(tmp_path))


def test_runs_py_says_which_runs_have_left_their_curve(tmp_path):
    facts = {"config": {"model": {"layers": 1, "hidden": 8, "heads": 2}, "training": {"steps": 9}}}
    for name, outside in (("on", False), ("off", True)):
        run = tmp_path / name
        run.mkdir()
        (run / "run.json").write_text(json.dumps(facts))
        (run / "metrics.jsonl").write_text("")
        row = {"iteration": 7, "loss": 4.0, "low": 1.0, "high": 2.0, "outside": outside}
        (run / "expected.jsonl").write_text(json.dumps(row) + "\n")
    _, notes = table.table(tmp_path, "loss")
    said = [note for note in notes if "left the band" in note]
    assert said == [f"{tmp_path / 'off'}: the loss left the band of --expect at step 7"]
