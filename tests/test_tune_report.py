"""What the tuner writes: rows of results, the page with its charts."""

import csv
import re
import sys
from html.parser import HTMLParser

import pytest
import ranks
from test_tune import SHAPE, tuned

from config import command_line, model_stats
from tuner import charts, result_tables


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
    assert table[0].keys() == set(result_tables.COLUMNS)
    assert len(table) == len({t["key"] for t in stored})
    assert [row["row_id"] for row in table] == [f"tune-{n}" for n in range(1, len(table) + 1)]
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


def test_the_page_is_whole_and_needs_nothing_else(finished):
    out, _ = finished
    page = (out / "report.html").read_text()

    class Tags(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open, self.seen, self.ids = [], [], []

        def note(self, tag, attributes):
            values = dict(attributes)
            assert not {"src", "href"} & values.keys()
            assert values.get("xlink:href", "#").startswith("#")
            self.ids += [values["id"]] if "id" in values else []
            self.seen.append(tag)

        def handle_starttag(self, tag, attributes):
            self.note(tag, attributes)
            if tag not in ("meta",):
                self.open.append(tag)

        def handle_startendtag(self, tag, attributes):
            self.note(tag, attributes)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen.count("svg") == 3
    assert "script" not in tags.seen
    assert len(set(tags.ids)) == len(tags.ids)
    assert "http" not in page
    for part in ("prefers-color-scheme", "viewport", "Rejected without a run", "train.py"):
        assert part in page


def test_charts_are_coloured_by_the_page_and_change_no_setting():
    import matplotlib

    before = dict(matplotlib.rcParams)
    values = [0.27, 0.3, 0.9]
    names = ["<a>", "b", "c"]
    memory = list(zip(names, [1.0, 2.0, 4.0], values))
    predicted = list(zip(names, [0.1, 0.2, 0.5], values))
    drawn = {
        charts.scatter(memory, "GB", "seconds"),
        charts.scatter(predicted, "x", "y", same_scale=True),
        charts.heat_map({(1, 1): 0.3, (2, 1): 0.4, (2, 4): 1234.0}),
    }
    assert dict(matplotlib.rcParams) == before
    assert charts.scatter(memory, "GB", "seconds") in drawn
    for chart in drawn:
        colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", chart))
        assert {colour for colour in colours if colour != "none"} <= {
            f"var(--{name})" for name in charts.COLORS
        }
    titles = [re.findall("<title>(.*?)</title>", chart) for chart in drawn]
    assert sorted(map(len, titles)) == [0, 3, 3]
    assert "<title>&lt;a&gt;: 1, 0.27</title>" in "".join(drawn)
    assert ">1,234<" in "".join(drawn)


@pytest.mark.parametrize(
    ("low", "high"), [(0.83, 1.2), (10.0, 14.4), (0.2, 0.9), (0.05, 80.0), (1e-4, 1e5)]
)
def test_a_logarithmic_axis_has_several_ticks(low, high):
    ticks = charts.round_values(low, high)
    assert len({charts.short_number(tick) for tick in ticks}) == len(ticks)
    assert 3 <= len(ticks) <= 12
    assert low <= min(ticks) < max(ticks) <= high


def test_replay_of_own_results(finished):
    out, _ = finished
    command = [sys.executable, "benchmarks/tune_replay.py", str(out / "results.csv")]
    done = ranks.start(command, 60)
    assert done.status == 0, done.err
    assert "| all rows |" in done.out
