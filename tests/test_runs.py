"""runs.py list, show and chart: if this failed, a table would hide an option that differs, or would
end at the first run that still trains, was killed, or is of an older version.
"""

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import ROOT, fork_one
from test_run_lock import holder

import runs
from architecture.model_stats import model_flops
from base.errors import UserError
from tools.numerics import chart, table
from tools.numerics.record import differing, find, read
from tools.planner import run_files
from tools.report.picture import PALETTE

SHAPE = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 61 --device cpu"
OPTIONS = f"{SHAPE} --global-batch-size 4 --eval-every 2 --eval-samples 4 --save-every 4"
OLD = Path(ROOT) / "tests/data/run_189cc1d"


def train(out: Path, words: str, status: int = 0) -> None:
    done = fork_one("train.py", *OPTIONS.split(), *words.split(), "--out", str(out))
    assert done.status == status, done.err


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two runs that differ in the learning rate; the second was resumed after step 4 of 8."""
    made = tmp_path_factory.mktemp("runs")
    train(made / "low", "--lr 1e-3 --steps 6")
    train(made / "deep/high", "--lr 4e-3 --steps 8 --stop-at-samples 16", status=75)
    train(made / "deep/high", "--lr 4e-3 --steps 8 --resume auto")
    return made


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    """A copy of the folder that a test may damage."""
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def test_list_shows_the_last_values_and_the_options_that_differ(folder, capsys):
    assert runs.run_command(["list", str(folder), "--json", "--sort", "run"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == []
    rows = {row["run"]: row for row in found["runs"]}
    assert {name: row["options"] for name, row in rows.items()} == {
        "deep/high": {"lr": 0.004},
        "low": {"lr": 0.001},
    }
    for name, row in rows.items():
        held = rows_of(folder / name)
        for key, column in (("loss", "loss"), ("validation", "validation_loss")):
            assert row[key] == next(r[column] for r in reversed(held) if column in r)
        assert row["tokens"] == held[-1]["consumed_tokens"]
        assert (row["state"], row["step"]) == ("finished", row["of"])
    assert [row["of"] for row in rows.values()] == [8, 6]
    assert (rows["low"]["layout"], rows["low"]["parameters"]) == ("tp1 pp1 cp1 dp1", 4416)
    assert runs.run_command(["list", str(folder), "--sort", "loss"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == [*table.FORMATS, "lr"]
    losses = [float(line.split()[5]) for line in lines]
    assert losses == sorted(losses)


def test_the_steps_that_a_resumed_run_repeats_are_taken_from_its_last_part(copied):
    run = copied / "deep/high"
    held = read(run).steps
    assert [row["iteration"] for row in held] == [*range(1, 9)]
    assert read(run).parts == ["", ".1"]
    repeated = [row | {"loss": 99.0} for row in held[4:6]]
    with open(run / "metrics.jsonl.1", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in repeated)
    assert read(run).steps == held
    (run / "metrics.jsonl.1").rename(run / "metrics.jsonl.2")
    shutil.copy(copied / "low/metrics.jsonl", run / "metrics.jsonl.1")  # of an earlier run
    assert (read(run).steps, read(run).parts) == (held, ["", ".2"])


def test_a_killed_run_is_listed_without_its_last_line(copied):
    file = copied / "low/metrics.jsonl"
    lines = file.read_text().splitlines()
    upto = next(n for n, line in enumerate(lines) if '"iteration": 5, ' in line)
    file.write_text("\n".join([*lines[:upto], lines[upto][:40]]))
    rows, notes = table.table(copied, "run")
    assert (rows[1]["state"], rows[1]["step"]) == ("stopped", 4)
    assert notes == [f"{file}: the last line is cut off and not read"]
    file.write_text("\n".join([lines[0], "damaged", lines[1], ""]))
    assert read(copied / "low").notes == [f"{file}: 1 lines are damaged and not read"]


def test_a_run_that_trains_is_running(copied):
    with holder(copied / "low") as other:
        assert [row["state"] for row in table.table(copied, "run")[0]] == ["finished", "running"]
        other.stdin.close()


def test_a_run_of_an_older_version_is_listed_and_shown_with_a_note(tmp_path, capsys):
    shutil.copytree(OLD, tmp_path / "old")
    assert runs.run_command(["list", str(tmp_path)]) == 0
    *_, old, lacks, unknown = capsys.readouterr().out.splitlines()
    assert old.split()[:3] == ["old", "finished", "6"]
    assert lacks.startswith(f"note: {tmp_path}/old/run.json is of an older version: it lacks")
    assert unknown.startswith(f"note: {tmp_path}/old/run.json has options of another version: ")
    assert "profile_step" in unknown
    assert runs.run_command(["show", str(OLD)]) == 0
    assert "is of an older version" in headings(capsys.readouterr().out)["notes"]


def test_damaged_runs_do_not_hide_the_others(copied):
    (copied / "low/run.json").write_text("{")
    rows, notes = table.table(copied, "run")
    assert [row["run"] for row in rows] == ["deep/high"]
    assert "low is no folder of a run" in notes[0]
    (copied / "deep/high/metrics.jsonl").unlink()
    (copied / "deep/high/metrics.jsonl.1").unlink()
    rows, notes = table.table(copied, "loss")
    assert (rows[0]["state"], rows[0]["loss"]) == ("empty", None)
    assert any("cannot read" in note for note in notes)


def test_what_is_no_folder_of_a_run(copied, tmp_path):
    for folder in (tmp_path / "copied/low/checkpoints", tmp_path / "missing"):
        with pytest.raises(UserError, match="has no folder with a"):
            runs.run_command(["list", str(folder)])
    with pytest.raises(UserError, match="is no folder of a run"):
        runs.run_command(["show", str(copied)])
    shutil.copy(copied / "low/run.json", copied / "low/checkpoints/run.json")
    assert [path.name for path in find(copied)] == ["high", "low"]


def headings(printed: str) -> dict[str, str]:
    """The lines of show by their headings, each joined with the lines that continue it."""
    lines = printed.replace("\n" + " " * 18, " ").splitlines()
    return {line[:18].strip(): line[18:] for line in lines}


def test_show_has_the_numbers_of_all_parts(folder, capsys):
    assert runs.run_command(["show", str(folder / "deep/high")]) == 0
    shown = headings(capsys.readouterr().out)
    losses = [row["loss"] for row in read(folder / "deep/high").steps]
    assert len(losses) == 8
    lowest = min(losses)
    best = f"lowest {lowest:.4f} at step {losses.index(lowest) + 1}"
    ends = [f"first {losses[0]:.4f} at step 1", f"last {losses[-1]:.4f} at step 8"]
    assert shown["loss"] == f"{ends[0]}, {best}, {ends[1]}"
    assert shown["run"] == f"{folder}/deep/high: finished, resumed 1 times"
    assert (shown["progress"], shown["checkpoints"]) == ("step 8 of 8", "at step 4,8")
    assert "lr 0.004" in shown["not default"]
    assert not re.search("weight_decay|ffn_hidden|head_size|max_positions", shown["not default"])
    assert shown["notes"] == "none"
    assert "spikes" not in shown


def test_show_names_spikes_and_steps_without_a_loss(copied, capsys):
    run = copied / "low"
    rows = rows_of(run)
    steps = [row for row in rows if "loss" in row]
    steps[0]["loss"] = steps[1]["loss"] = steps[-1]["loss"] = float("nan")
    steps[1]["skipped"] = True
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "spikes.jsonl").write_text('{"iteration": 4, "loss": 9.0}\n')
    (run / "hang").mkdir()
    (run / "hang/case.json").write_text('{"kind": "dead", "culprits": [3], "error": "SIGKILL"}')
    assert runs.run_command(["show", str(run)]) == 0
    shown = headings(capsys.readouterr().out)
    assert shown["not finite"] == "at step 1-2,6"
    assert (shown["no update"], shown["spikes"]) == ("at step 2", "at step 4")
    assert shown["fault"] == "dead, ranks 3: SIGKILL"
    assert "lowest nan" not in shown["loss"]
    (found,) = (row for row in table.table(copied, "loss")[0] if row["run"] == "low")
    assert found["loss"] is None


def test_a_curve_has_the_tokens_the_seconds_and_the_flops_of_all_parts(folder):
    (curve,) = chart.read_curves([folder / "deep/high"])
    steps = read(folder / "deep/high").steps
    assert curve.loss == pytest.approx([row["loss"] for row in steps])
    tokens, seconds, flops = curve.over
    assert list(tokens) == [32 * step for step in range(1, 9)]
    assert seconds[-1] == pytest.approx(sum(row["seconds"] for row in steps))
    model = run_files.config_of(str(folder / "low")).model
    assert flops == pytest.approx([model_flops(model, 4) * step for step in range(1, 9)])
    (old,) = chart.read_curves([OLD])
    shape = run_files.config_of(str(OLD)).model
    assert old.over[2, -1] == pytest.approx(model_flops(shape, 6 * 4)), "of all four ranks"


def test_chart_writes_one_page_that_needs_no_other_file(copied, tmp_path, capsys):
    (copied / "low").rename(copied / "a $^<b> $^")
    given = [str(copied / "a $^<b> $^"), str(copied / "deep/high")]
    page = tmp_path / "page.html"
    assert runs.run_command(["chart", *given, "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"written: {page}\n"
    text = page.read_text()
    assert "<script" not in text
    title = "Losses of 2 runs, over tokens, seconds and FLOPs"
    assert f"<title>{title}</title>\n<h1>{title}</h1>" in text
    assert "pre { white-space: pre-wrap" in text, "a long line would leave the page"
    assert set(re.findall(r"https?://[\w.]+", text)) == {"http://www.w3.org"}
    svg = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    words = ["".join(each.itertext()).strip() for each in svg.iter() if each.tag.endswith("}text")]
    assert {*chart.AXES, f"{given[0]}: steps 6, lr 0.001"} <= {*words}
    for name in ("mark", "orange"):
        light, dark = PALETTE[name]
        assert len(re.findall(f'style="fill: none; stroke: {light}', text)) == 3 + 1, "and a legend"
        assert f'[style*="stroke: {light}"] {{ stroke: {dark} !important; }}' in text
    with pytest.raises(UserError, match="cannot write"):
        runs.run_command(["chart", *given, "--out", str(tmp_path / "none/page.html")])


def test_the_numbers_of_an_axis_are_few_and_short(tmp_path):
    """Seven digits for each of nine numbers would touch; the last one left the picture."""
    steps = np.linspace(0.01, 1, 100)
    over = np.array([409_600 * steps, 52 * steps, 1.7e12 * steps])
    text = chart.page([chart.ChartCurve("run", 8 - 3 * steps, over, [])])
    svg = text[text.index("<svg") : text.index("</svg>")]
    numbers = re.findall(r">(\d[^<]*)</text>", svg)
    assert {"400k", "45", "1.6T"} <= set(numbers)
    assert max(map(len, numbers)) <= 4
    assert len(numbers) <= 3 * 6 + 8, "of three axes, and of the losses"
    assert "e12" not in svg


def test_bars_have_one_scale_over_the_most_tokens(copied, capsys):
    for name, count, last in (("low", 6, 1.0), ("deep/high", 3, 8.0)):
        rows = [row for row in rows_of(copied / name) if "loss" in row][:count]
        for number, row in enumerate(rows, 1):
            row |= {"loss": last, "consumed_tokens": 100 * number, "iteration": number}
        rows[1]["loss"] = float("nan")
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (copied / name / "metrics.jsonl").write_text(text)
    words = ["chart", str(copied / "low"), str(copied / "deep/high"), "--text"]
    assert runs.run_command(words) == 0
    _, low, _, high, scale = capsys.readouterr().out.splitlines()
    assert low == f"    {'▁' * 10}{' ' * 10}{'▁' * 40} 1.0000"
    assert high == f"    {'█' * 10}{' ' * 10}{'█' * 10} 8.0000"
    assert scale == "bars: losses from 1.0000 to 8.0000, over 0 to 600 tokens"
    (copied / "low/metrics.jsonl").write_text("")
    for command in (words, ["diff", str(copied / "deep/high"), str(copied / "low")]):
        with pytest.raises(UserError, match="low has no row of a step"):
            runs.run_command(command)


values = st.one_of(st.none(), st.integers(0, 2), st.sampled_from(["a", "b"]), st.just([1, 2]))
runs_of_options = st.lists(
    st.dictionaries(st.sampled_from("uvwxyz"), values), min_size=1, max_size=5
)


@given(runs_of_options)
def test_exactly_the_options_that_differ_are_columns(given_options):
    found = differing(given_options)
    for name in {name for each in given_options for name in each}:
        column = [each.get(name) for each in given_options]
        assert (name in found) == any(value != column[0] for value in column)
        assert found.get(name, column) == column
