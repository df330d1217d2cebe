"""The page for the morning: if this failed, it would hide a restart, or run what a name has."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from ranks import ROOT

import runs
from base.errors import UserError
from tools.numerics import run_page
from tools.numerics.record import read_steps

OLD = ROOT / "tests/data/run_189cc1d"
EVIL = '</text><script>alert("x")</script>&\x1b[31m$x_1$'


class Tags(HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [value for name, value in values.items() if name in ("src", "href")]
        self.links += [values["xlink:href"]] if "xlink:href" in values else []
        assert not [name for name in values if name.startswith("on")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


def step(iteration: int, **more) -> dict:
    """A row of a step with 64 tokens."""
    row = {"iteration": iteration, "consumed_samples": 4 * iteration, "seconds": 0.5}
    row |= {"consumed_tokens": 64 * iteration, "loss": 5.0 - iteration / 10, "grad_norm": 1.0}
    row |= {"tokens_per_second": 128.0, "learning_rate": 1e-3, "global_batch_size": 4}
    return row | {"tflops_model": 0.1} | more


def write_run(folder: Path, name: str = "c", **facts) -> Path:
    """A run of 20 steps that was resumed after step 8, with two corpora, tasks and a spike."""
    folder.mkdir(parents=True)
    config = json.loads((OLD / "run.json").read_text())["config"]
    config["training"] |= {"steps": 20}
    first, second = [], []
    for n in range(1, 21):
        tokens = {"a": 64.0 * n if n <= 10 else 640.0, name: 0.0 if n <= 10 else 64.0 * (n - 10)}
        row = step(n, corpus_tokens=tokens, corpus_epochs={"a": 0.1, name: 0.1})
        if n <= 10:
            first.append(row)
        if n > 8:
            second.append(row)
    second.append({"iteration": 20, "consumed_samples": 80, "consumed_tokens": 1280})
    second[-1] |= {"validation_loss": 3.5, "books_loss": 3.25}
    for task, accuracy in ((name, 0.25), ("other", 0.5)):
        values = {"accuracy": accuracy, "normalised_accuracy": 0.5, "bits_per_byte": 1.5}
        place = {"iteration": 20, "consumed_samples": 80, "consumed_tokens": 1280}
        second.append(place | {"task": task} | values)
    for number, rows, resume in ((".1", first, None), ("", second, "auto")):
        config["run"] |= {"resume": resume}
        text = json.dumps({"config": config, "started": "2026-11-28"} | facts)
        (folder / f"run.json{number}").write_text(text)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"metrics.jsonl{number}").write_text(lines)
    (folder / "spikes.jsonl").write_text('{"iteration": 12, "of": "loss", "loss": 9.0}\n')
    return folder


@pytest.mark.parametrize("name", ["phases", "stages"], ids=["now", "version 0.3"])
def test_the_series_are_those_of_the_rows(name, tmp_path):
    phases = [{"name": "one", "from_tokens": 0}, {"name": "two", "from_step": 10}]
    phases += [{"name": "later", "from_tokens": 9999}]
    folder = write_run(tmp_path / "run", **{name: phases})
    series = run_page.series_of(read_steps(folder))
    tokens, losses = series.loss
    assert tokens.tolist() == [64.0 * n for n in range(1, 21)]
    assert losses == pytest.approx([5.0 - n / 10 for n in range(1, 21)])
    assert series.resumes == [64.0 * 8], "steps 9 and 10 were trained again"
    assert series.spikes == [64.0 * 12]
    assert series.phases == {0.0: "one", 640.0: "two"}
    places, share = series.shares["a"]
    assert share.tolist() == [1.0] * 10 + [0.0] * 10
    assert series.shares["c"][1].tolist() == [0.0] * 10 + [1.0] * 10
    assert places.tolist() == tokens.tolist()
    assert {k: v[1].tolist() for k, v in series.evaluations.items()} == {
        "validation": [3.5],
        "books": [3.25],
    }
    assert {k: v[1].tolist() for k, v in series.tasks["accuracy"].items()} == {
        "c": [0.25],
        "other": [0.5],
    }
    assert series.tasks["bits_per_byte"]["c"][0].tolist() == [1280.0]
    assert series.speed[1].tolist() == [128.0] * 20
    assert series.rate[1] == pytest.approx([1e-3] * 20)


def test_one_page_of_one_file_in_which_names_are_texts(tmp_path, capsys):
    branch = {"run": EVIL, "step": 3}
    folder = write_run(tmp_path / "a & <b>", EVIL, phases=[{"name": EVIL, "from_tokens": 64}])
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(facts | {"branch": branch}))
    out = tmp_path / "page.html"
    assert runs.run_command(["page", str(folder), str(OLD), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"written: {out}\n"
    page = out.read_text()
    found = Tags(page)
    assert found.open == []
    assert not found.tags & {"script", "iframe", "img", "link", "object"}
    assert all(link.startswith("#") for link in found.links)
    assert len(set(found.ids)) == len(found.ids), "of two pictures"
    assert set(re.findall(r"https?://[\w.]+", page)) == {"http://www.w3.org"}
    assert "\x1b" not in page
    shown = EVIL.replace("\x1b", "\\x1b")
    assert found.texts.count(shown) >= 4, "a phase, a task in three panels, a corpus"
    assert any(shown in text for text in found.texts if "branch of" in text)
    assert {"loss, nats per token", "accuracy", "bits per byte", "tokens/s"} <= {*found.texts}
    assert {"learning rate", "share of tokens", "spike", "resumed", "books"} <= {*found.texts}
    assert sum("step 20 of 20" in text for text in found.texts) == 1
    assert page.count("<svg") == 2
    with pytest.raises(UserError, match="cannot write"):
        runs.run_command(["page", str(folder), "--out", str(tmp_path / "none/page.html")])
    with pytest.raises(UserError, match="is no folder of a run"):
        runs.run_command(["page", str(tmp_path), "--out", str(out)])


HOSTILE = [
    {"phases": 3},
    {"phases": [3, {"name": 4, "from_tokens": "x"}, {"name": None, "from_step": 10**30}]},
    {"phases": [{"from_tokens": float("nan")}, {"name": [], "from_tokens": -5}]},
    {"branch": [1, 2]},
    {"branch": {"run": {"a": 1}}},
]


@pytest.mark.parametrize("facts", HOSTILE, ids=[str(n) for n in range(len(HOSTILE))])
def test_facts_and_rows_of_other_types_are_left_out(facts, tmp_path):
    folder = write_run(tmp_path / "run", **facts)
    rows = [
        {"iteration": 20, "consumed_tokens": 1280, "task": 3, "accuracy": 1.0},
        {"iteration": 20, "consumed_tokens": 1280, "task": "t", "accuracy": "high"},
        {"iteration": 20, "consumed_tokens": 1280, "books_loss": "low"},
        {"iteration": 20, "consumed_tokens": 2000, "corpus_tokens": {"a": "many"}},
        {"iteration": 20, "consumed_tokens": 2000, "corpus_tokens": [1]},
        {"iteration": 20, "consumed_tokens": 1280, "task": "n", "accuracy": float("nan")},
    ]
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    series = run_page.series_of(read_steps(folder))
    assert set(series.tasks["accuracy"]) == {"c", "other", "n"}
    assert set(series.evaluations) == {"validation", "books"}
    assert set(series.shares) == {"a", "c"}
    assert all(0 <= place <= 1280 for place in series.phases)
    assert Tags(run_page.page([folder])).open == []


def test_a_long_run_has_few_points_and_many_names_are_counted(tmp_path):
    folder = write_run(tmp_path / "run")
    rows = [step(n) for n in range(9, 3000)]
    rows += [
        {"iteration": 2999, "consumed_tokens": 64 * 2999, "task": f"_{n}", "accuracy": 0.5}
        for n in range(20)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"iteration": n} for n in range(100, 400)]
    (folder / "spikes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    series = run_page.series_of(read_steps(folder))
    assert len(series.loss[0]) == 400
    assert np.isfinite(series.loss[1]).all()
    page = run_page.page([folder])
    words = " ".join(Tags(page).texts)
    assert "8 more tasks" in words
    assert "200 earlier spikes" in words
    assert len(page) < 1_000_000
