"""Phases of a run (--phases): if this failed, a change of corpora, lengths or batches would lose
tokens of a corpus, read some twice, or depend on restarts and layouts.
"""

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from small_corpora import write_chats, write_corpora

import data
from base.errors import UserError
from checkpointing.resumed import has_order_of
from config.command_line import parse_request
from config.inherited import Inherited, inherited
from config.learning_rate import learning_rate, rate_at
from config.past import from_text, to_text
from config.phases import changes, from_saved
from config.schema import Config
from config.timeline import Timeline
from config.validation import check
from corpora.token_files import IndexedDataset

SHAPE = "--layers 1 --hidden 8 --heads 2 --seq-length 16 --vocab-size 61"
TEXT = "--cache none --split 100,0"  # of runs that read corpora


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    write_corpora(folder)
    write_chats(folder)
    return folder


def written(path: Path, phases: list[dict], **top) -> str:
    """The file of these phases."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
    for phase in phases:
        lines += ["[[phase]]", *(f"{key} = {json.dumps(value)}" for key, value in phase.items())]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def first_start(words: str, ranks: int = 1) -> Config:
    return check(parse_request([*SHAPE.split(), *words.split()]).config, ranks)


def resumed(before: Config, steps: int, words: str, ranks: int = 1, version: str = "now") -> Config:
    """The configuration of a start that resumes `before` after `steps` steps, through its text.

    version: "0.3" if the checkpoint is of that version, which wrote "stages".
    """
    timeline = Timeline(before)
    samples = before.past.consumed(steps, timeline.batches)
    saved = json.loads(json.dumps(before.as_dict()))
    begun = tuple(phase.begun() for phase in timeline.phases if phase.samples < samples)
    starts = before.past.with_start(timeline.batches)
    text = to_text(starts, timeline.ordered, "", begun)
    if version == "0.3":
        assert text.count('"phases"') == 1
        text = text.replace('"phases"', '"stages"')
        saved["plan"]["stages"] = saved["plan"].pop("phases")
    past = from_text(text, steps, samples, timeline.tokens_at(samples))

    def of_checkpoint(given):
        options = inherited(saved, given)
        plan = from_saved(saved.get("plan"), "STEP")
        return Inherited(options, before.model, past, "STEP", plan=plan)

    request = parse_request(["--resume", "auto", *words.split()], resumed=of_checkpoint)
    config = check(request.config, ranks)
    if not has_order_of(saved, config):
        config = replace(config, past=replace(config.past, ordered=()))
    return config


def inputs_of(samples: data.Samples, k: int) -> list[tuple[str, int, int]]:
    """The tokens of sample k without the last label, as (corpus, sequence, place)."""
    places = [
        (span.prefix, span.sequence, span.offset + i)
        for span in samples.spans(k)
        for i in range(span.length)
    ]
    return places[:-1]


def read_steps(config: Config, first: int, stop: int) -> list[tuple[str, int, int]]:
    """The tokens of the steps [first, stop) of a start, in the order of its micro-batches."""
    samples = data.build(config).train
    timeline = Timeline(config)
    layout = config.layout
    places = []
    for step in range(first, stop):
        begin = config.past.consumed(step, timeline.batches)
        batch = timeline.batch_at(begin)
        for index in range(layout.micro_batches(batch)):
            for rank in range(layout.dp):
                at = data.first_of_micro_batch(begin, index, layout, rank)
                for k in range(at, at + layout.micro_batch_size):
                    places += inputs_of(samples, k)
                    assert len(samples.sample(k)) == timeline.length_at(begin) + 1
    return places


def tokens_of(prefix: str) -> set[tuple[str, int, int]]:
    """All tokens of a corpus."""
    lengths = IndexedDataset(prefix).lengths.tolist()
    return {(prefix, i, j) for i, length in enumerate(lengths) for j in range(length)}


def check_epochs(places: list[tuple[str, int, int]]) -> None:
    """Every epoch of every corpus is a permutation of its tokens, finished before the next."""
    for prefix in {place[0] for place in places}:
        of_corpus = [place for place in places if place[0] == prefix]
        whole = tokens_of(prefix)
        for begin in range(0, len(of_corpus), len(whole)):
            epoch = of_corpus[begin : begin + len(whole)]
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= whole
            if len(epoch) == len(whole):
                assert set(epoch) == whole


def drawn_phases(draw: random.Random, folder: Path, count: int, begin: int = 0) -> list[dict]:
    """Phases with other corpora, weights, lengths and batches."""
    phases = []
    tokens = begin
    for number in range(count):
        names = draw.sample(["a", "b", "c", "chats"], draw.randint(1, 3))
        words: list = [f"{folder}/{name}" for name in names]
        if draw.random() < 0.7:
            words = [word for name in words for word in (draw.choice([0.2, 0.5, 3]), name)]
        phase = {"name": f"s{number}", "from_tokens": tokens, "data": words}
        phase["seq_length"] = draw.choice([4, 7, 8, 12, 16])
        phase["global_batch_size"] = draw.choice([4, 8, 12])
        if phases and draw.random() < 0.3:  # only the batch may change, so that the blend goes on
            phase |= {key: phases[-1][key] for key in ("data", "seq_length")}
        phases.append(phase)
        tokens += draw.randint(200, 1500)
    return phases


LAYOUTS = [(1, ""), (2, "--micro-batch-size 2"), (4, ""), (4, "--micro-batch-size 1 --tp 2")]


@pytest.mark.parametrize("seed", range(25))
def test_every_token_is_read_as_often_as_its_epochs_say(seed, corpora, tmp_path):
    """Four random plans for each seed, with restarts under other layouts, batches and futures."""
    draw = random.Random(seed)
    for _ in range(4):
        phases = drawn_phases(draw, corpora, draw.randint(1, 5))
        end = phases[-1]["from_tokens"] + draw.randint(300, 2000)
        path = written(tmp_path / "phases.toml", phases, train_tokens=end)
        ranks, layout = draw.choice(LAYOUTS)
        config = first_start(f"{TEXT} --phases {path} {layout}", ranks)
        step = 0
        places = []
        is_one_run = True
        while step < (timeline := Timeline(config)).total_steps:
            stop = min(timeline.total_steps, step + draw.randint(1, 30))
            places += read_steps(config, step, stop)
            step = stop
            words = ""
            consumed = config.past.consumed(step, timeline.batches)
            begun = [phase for phase in timeline.phases if phase.samples < consumed]
            if draw.random() < 0.4:  # the future changes, the past does not
                now = timeline.tokens_at(consumed)
                kept = phases[: len(begun)]
                phases = kept + drawn_phases(
                    draw, corpora, draw.randint(0, 2), now + draw.randint(0, 300)
                )
                for number, phase in enumerate(phases):
                    phase["name"] = f"s{number}"
                end = max(end, phases[-1]["from_tokens"] + 400)
                words = f"--phases {written(tmp_path / 'phases.toml', phases, train_tokens=end)}"
            if draw.random() < 0.2:  # another batch in the phase that has begun
                phases[len(begun) - 1]["global_batch_size"] = draw.choice([4, 8, 12])
                words = f"--phases {written(tmp_path / 'phases.toml', phases, train_tokens=end)}"
                is_one_run = False
            ranks, layout = draw.choice(LAYOUTS)
            config = resumed(config, step, f"{words} {layout}", ranks)
        check_epochs(places)
        if is_one_run:
            path = written(tmp_path / "phases.toml", phases, train_tokens=end)
            again = first_start(f"{TEXT} --phases {path}")
            assert read_steps(again, 0, Timeline(again).total_steps) == places


@pytest.mark.parametrize("order", ["megatron", "stable"])
@pytest.mark.parametrize(
    "words", ["{0}/a", "2 {0}/a 1 {0}/c", "{0}/a {0}/c"], ids=["one", "weights", "sizes"]
)
def test_a_run_that_began_without_phases_goes_on_where_it_was(words, order, corpora, tmp_path):
    """Its order is read to the end, each token as often as the order's epochs, before the next."""
    options = (
        f"{TEXT} --data {words.format(corpora)} --order {order} --steps 30 --global-batch-size 1"
    )
    first = first_start(options)
    places = read_steps(first, 0, 13)
    phase = {"from_tokens": 13 * 16, "data": [f"{corpora}/a"], "seq_length": 8}
    path = written(tmp_path / "phases.toml", [phase], train_tokens=13 * 16 + 1600)
    second = resumed(first, 13, f"--phases {path}")
    begins = [(phase.name, phase.tokens) for phase in Timeline(second).phases]
    assert begins == [("start", 0), ("phase 1", 13 * 16)]
    places += read_steps(second, 13, 40)
    third = resumed(second, 40, "")
    places += read_steps(third, 40, Timeline(third).total_steps)
    of_a = [place for place in places if place[0] == f"{corpora}/a"]
    whole = tokens_of(f"{corpora}/a")
    legacy = data.build(first).train
    epochs = max(
        1,
        len([p for k in range(len(legacy)) for p in inputs_of(legacy, k) if p[0] == f"{corpora}/a"])
        // len(whole)
        + 1,
    )
    counts = Counter(of_a[: epochs * len(whole)])
    assert set(counts) == whole
    assert set(counts.values()) == {epochs}
    check_epochs(of_a[epochs * len(whole) :])


def test_what_is_over_cannot_change(corpora, tmp_path):
    phases = [
        {"from_tokens": 0, "data": [f"{corpora}/a"], "seq_length": 8},
        {"from_tokens": 640, "data": [f"{corpora}/b"], "name": "later"},
    ]
    path = tmp_path / "phases.toml"
    run = first_start(f"{TEXT} --phases {written(path, phases, train_tokens=2000)}")
    for change, problem in (
        ({"data": [f"{corpora}/c"]}, "reads .*/c, but the run reads .*/a in phase phase 1"),
        ({"seq_length": 4}, "samples of 4 tokens, but the run has samples of 8 tokens"),
    ):
        changed = [phases[0] | change, phases[1]]
        with pytest.raises(UserError, match=problem):
            resumed(run, 5, f"--phases {written(path, changed, train_tokens=2000)}")
    changed = [phases[0], phases[1] | {"from_tokens": 128}]
    with pytest.raises(UserError, match="is from 128 tokens on, but the run has read 320 tokens"):
        resumed(run, 5, f"--phases {written(path, changed, train_tokens=2000)}")
    changed = [phases[0], phases[1] | {"from_tokens": 320, "global_batch_size": 4}]
    later = resumed(run, 5, f"--phases {written(path, changed, train_tokens=2100)}")
    assert [(s.step, s.tokens) for s in Timeline(later).phases] == [(0, 0), (5, 320)]
    assert changes(run.plan, later.plan) == [
        "phase later from_tokens 640 before, 320 now",
        "phase later global_batch_size not given before, 4 now",
        "train_tokens 2000 before, 2100 now",
    ]
    assert resumed(run, 5, "").plan == replace(run.plan, path="STEP")
    file = written(path, [phases[0]], train_tokens=300)
    with pytest.raises(
        UserError, match=r"train_tokens\(300\) is less than the 320 tokens that are"
    ):
        resumed(run, 5, f"--phases {file}")
    longer = resumed(run, 5, "--steps 40")
    assert (Timeline(longer).total_steps, longer.plan.train_tokens) == (40, None)


MISTAKES = [
    ("", "has no [[phase]] table"),
    ("phase = 3", "has no [[phase]] table"),
    ("[[phase]]", "has no from_tokens"),
    ("[[phase]]\nfrom_tokens = -1", "from_tokens is a whole number from 0 on, not -1"),
    ("[[phase]]\nfrom_tokens = '5Q'", "from_tokens is a whole number from 0 on, not '5Q'"),
    ("[[phase]]\nfrom_tokens = 0\nseq_lenght = 8", "unknown key 'seq_lenght'"),
    ("[[phase]]\nfrom_tokens = 0\nseq_length = 32", "give --seq-length 32"),
    ("[[phase]]\nfrom_tokens = 0\n[[phase]]\nfrom_tokens = 0", "is not after phase phase 1"),
    (
        "[[phase]]\nfrom_tokens = 0\n[[phase]]\nfrom_tokens = 1\n[[phase]]\nfrom_tokens = 2",
        "has no step",
    ),
    ("train_tokens = 5\n[[phase]]\nfrom_tokens = 9", "is not after the begin of phase phase 1"),
    ("[[phase]]\nfrom_tokens = 0\nlr = 1", "gives lr, and no lr_schedule"),
    ("[[phase]]\nfrom_tokens = 0\nlr_schedule = 'cosin'", "lr_schedule is one of"),
    (
        "[[phase]]\nfrom_tokens = 0\nlr_schedule = 'linear'\nmin_lr = 1",
        "min_lr(1) is above lr(0.0003)",
    ),
    ("[[phase]]\nfrom_tokens = 0\nglobal_batch_size = 0", "from 1 on, not 0"),
    ("[[phase]]\nfrom_tokens = 0\ndata = []", "data is a list such as"),
    ("[[phase]]\nfrom_tokens = 0\ndata = [1, 'synthetic']", "synthetic must be alone"),
    ("[[phase]]\nfrom_tokens = 0\ndata = ['x', 'x']", "reads x twice"),
    (
        "[[phase]]\nfrom_tokens = 0\n[[phase]]\nfrom_tokens = 500\ndata = ['x']",
        "do not mix with files",
    ),
    (
        "[[stage]]\nfrom_tokens = 0\n[[phase]]\nfrom_tokens = 9",
        "has [[stage]] and [[phase]] tables: call all of them [[phase]]",
    ),
    ("max_epochs = 3\n[[phase]]\nfrom_tokens = 0", "max_epochs is a table of PREFIX = EPOCHS"),
    ("[[phase]]\nfrom_tokens = 0\nname = ''", "the name of phase 1 is a text"),
]


@pytest.mark.parametrize(("text", "problem"), MISTAKES, ids=[p for _, p in MISTAKES])
def test_a_wrong_file_is_refused_in_a_sentence(text, problem, tmp_path):
    path = tmp_path / "phases.toml"
    path.write_text(text)

    def begin():
        data.build(first_start(f"--phases {path} --steps 100"))

    with pytest.raises(UserError) as error:
        begin()
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_rates_of_phases_and_of_a_run_that_they_do_not_change(tmp_path):
    """One length: bit for bit the run without phases. Own schedules go over their own tokens."""
    options = "--global-batch-size 8 --lr 1e-2 --min-lr 1e-3 --lr-warmup-samples 40 --steps 60"
    plain = first_start(options)
    path = written(tmp_path / "a.toml", [{"from_tokens": 0}, {"from_tokens": 3000}])
    phased = first_start(f"{options} --phases {path}")
    by_phases, by_options = Timeline(phased), Timeline(plain)
    assert (by_phases.total_samples, by_phases.total_steps) == (480, 60)
    for consumed in range(0, 480, 8):
        expected = learning_rate(plain.training, consumed, 480, 8)
        assert rate_at(by_phases, consumed, 0, 8) == expected
        assert rate_at(by_options, consumed, 0, 8) == expected
    phases = [
        {"from_tokens": 0, "lr_schedule": "constant", "lr_warmup_tokens": 640, "seq_length": 8},
        {"from_tokens": 1280, "lr_schedule": "linear", "lr": 4e-3, "min_lr": 0, "seq_length": 4},
    ]
    path = written(tmp_path / "b.toml", phases, train_tokens=1280 + 640)
    run = first_start(f"--global-batch-size 8 --lr 1e-2 --phases {path}")
    timeline = Timeline(run)
    rates = [rate_at(timeline, first, 0, 8) for first in range(0, timeline.total_samples, 8)]
    assert rates[:10] == pytest.approx([1e-2 * (n + 1) / 11 for n in range(10)])
    assert rates[10:20] == [1e-2] * 10
    assert rates[20:] == pytest.approx([4e-3 * (1 - n / 20) for n in range(20)])


def test_a_phase_that_reads_the_same_goes_on_in_the_blend(corpora, tmp_path):
    """A branch, and a phase with another rate or batch, read what one phase would have read."""
    blend = {"data": [0.6, f"{corpora}/a", 0.3, f"{corpora}/b", 0.1, f"{corpora}/c"]}
    other = {"from_tokens": 0, "data": [f"{corpora}/b"]}
    one = [other, blend | {"from_tokens": 160}]
    cut = [*one, blend | {"from_tokens": 160 + 7 * 16, "lr_schedule": "linear"}]
    cut.append(blend | {"from_tokens": 160 + 18 * 16})
    read = []
    for phases in (one, cut):
        path = written(tmp_path / "s.toml", phases, train_tokens=160 + 40 * 16)
        run = first_start(f"{TEXT} --phases {path} --global-batch-size 1")
        assert Timeline(run).total_samples == 50
        samples = data.build(run).train
        read.append([inputs_of(samples, k) for k in range(Timeline(run).total_samples)])
    assert read[0] == read[1]


def test_a_sample_is_consecutive_text_and_its_last_label_follows_in_it(corpora, tmp_path):
    phases = [
        {"from_tokens": 0, "data": [f"{corpora}/b"], "seq_length": 8},
        {"from_tokens": 64, "data": [f"{corpora}/b"], "seq_length": 16},
    ]
    run = first_start(
        f"{TEXT} --phases {written(tmp_path / 's.toml', phases, train_tokens=1000)} "
        "--global-batch-size 4"
    )
    samples = data.build(run).train
    corpus = IndexedDataset(f"{corpora}/b")
    cut = 0
    for k in range(Timeline(run).total_samples):
        spans = samples.spans(k)
        text = np.concatenate([corpus.get(s.sequence, s.offset, s.length) for s in spans])
        assert np.array_equal(samples.sample(k), text)
        for before, after in pairwise(spans):
            # One sequence ends and another begins, unless a block ends there.
            ends = before.offset + before.length == corpus.lengths[before.sequence]
            cut += not (ends and after.offset == 0)
    assert cut <= 4  # where an epoch ends inside of a sample


# ---- The names of version 0.3 --------------------------------------------------------------------


def test_stages_of_earlier_versions_are_phases(tmp_path):
    """The flag, the key of a run file and the tables: the run is the same, and a line says so."""
    tables = [{"from_tokens": 0}, {"name": "b", "from_tokens": 320, "seq_length": 8}]
    path = written(tmp_path / "phases.toml", tables, train_tokens=1000)
    now = Timeline(first_start(f"--phases {path}"))
    old = tmp_path / "stages.toml"
    old.write_text(Path(path).read_text().replace("[[phase]]", "[[stage]]"))
    file = tmp_path / "run.toml"
    file.write_text(f'stages = "{old}"\n')
    for words in (f"--stages {old}", f"--stages={old}", f"--config {file}"):
        timeline = Timeline(first_start(words))
        names = [phase.name for phase in timeline.phases]
        assert names == ["stage 1", "b"], "as in the run's checkpoints"
        assert [p.samples for p in timeline.phases] == [p.samples for p in now.phases]
        assert (timeline.batches, timeline.total_samples) == (now.batches, now.total_samples)
    notes = parse_request([*SHAPE.split(), "--stages", str(old)]).notes
    assert notes == ("--stages is called --phases now",)
    with pytest.raises(UserError, match="--phases and --stages are one option"):
        first_start(f"--stages {old} --phases {path}")
    file.write_text(f'stages = "{old}"\n[data]\nphases = "{path}"\n')
    with pytest.raises(UserError, match=r"gives 'phases' twice: at the top and in .data."):
        first_start(f"--config {file}")


def test_a_checkpoint_of_an_earlier_version_goes_on_with_its_stages(tmp_path):
    tables = [{"from_tokens": 0}, {"name": "b", "from_tokens": 320, "seq_length": 8}]
    before = first_start(f"--phases {written(tmp_path / 'phases.toml', tables, train_tokens=1000)}")
    for steps in (1, 3, 6):
        old = resumed(before, steps, "", version="0.3")
        assert old == resumed(before, steps, "")
        assert old.plan is not None
        assert old.past.phases
