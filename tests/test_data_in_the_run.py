"""If this failed, evaluations and tokens by corpus would be counted wrong."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from test_golden import check_lines

import data
import trainer
from config import validation
from config.command_line import parse
from config.messages import UserError
from config.run_options import parse_eval_sets
from corpora.token_files import IndexedDatasetWriter
from corpora.usage import Usage
from distributed.launch import Launch

VOCAB = 61


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
    """Three corpora, a, b and c; a has 12 samples of 16 tokens, c 21."""
    folder = tmp_path_factory.mktemp("corpora")
    for number, (name, lengths) in enumerate(
        {"a": [20] * 10, "b": [30] * 8, "c": [7] * 49}.items()
    ):
        random = np.random.default_rng(number)
        with IndexedDatasetWriter(str(folder / name), VOCAB) as writer:
            for length in lengths:
                writer.add_document(random.integers(VOCAB, size=length))
    return folder


def options(folder: Path, **changed) -> dict:
    """A run on a blend, with two evaluation sets."""
    blend = [0.7, str(folder / "a"), 0.3, str(folder / "b")]
    return {
        "data": blend,
        "order": "stable",
        "split": "1",
        "cache": "none",
        "eval_data": [f"whole={folder / 'c'}", f"part={folder / 'c'}:5"],
    } | changed


def configure(words: str):
    shape = (
        "--layers 1 --hidden 8 --heads 2 --seq-length 16 --vocab-size 61 --pad-vocab-multiple 4 "
    )
    return validation.check(parse((shape + "--device cpu --no-watchdog " + words).split()), ranks=1)


def words_of(folder: Path, **changed) -> str:
    flat = {
        name: value if isinstance(value, str) else " ".join(map(str, value))
        for name, value in options(folder, **changed).items()
        if value is not None
    }
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flat.items())


def rows(out: Path) -> list[dict]:
    files = [*out.glob("metrics.jsonl.*"), out / "metrics.jsonl"]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------
# Layouts
# ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_layout_reads_the_same_and_evaluates_the_same(corpora, tmp_path):
    results = check_lines("data", tmp_path, corpora)
    assert all(set(result["evaluated"]) == {"whole", "part"} for result in results)
    assert len({round(result["evaluated"]["whole"], 9) for result in results}) == 5


def test_a_full_evaluation_counts_every_sample_once(corpora):
    """Against the mean over batches of one sample each, of every sample of the corpus."""
    config = configure(f"--steps 1 --micro-batch-size 4 {words_of(corpora)}")
    state, sets = trainer.build(config), data.build(config).eval_sets
    samples, count = sets["whole"]
    assert (count, sets["part"][1]) == (21, 5)
    seen = sorted(span[1:4] for k in range(count) for span in samples.spans(k))
    assert seen[0] == (0, 0, 7)
    assert sum(length for *_, length in seen) == 21 * 17  # neighbours share a token
    model, total = state.stages[0], 0.0
    with torch.no_grad():
        for k in range(count):
            tokens = torch.from_numpy(samples.sample(k))[None]
            total += model(tokens[:, :-1], data.Batch(tokens[:, :-1], tokens[:, 1:], 16)).item()
    found = trainer.evaluate(state, samples, count)
    assert found == pytest.approx(total / (21 * 16), rel=1e-6)
    state.reader.close()


# ------------------------------------------------------------------------------------------------
# Whole runs
# ------------------------------------------------------------------------------------------------


def test_tokens_and_epochs_by_corpus_are_exact_after_a_restart(corpora, tmp_path, capsys):
    """With a skipped batch before and one after it; counted again from the samples' places."""
    words = words_of(corpora) + " --eval-every 4 --skip-samples 8:9 60:61 --save-every 5 "
    words += "--steps 10 --lr-schedule constant --out "
    whole = configure(words + str(tmp_path / "whole") + " --tensorboard")
    trainer.main(whole, Launch("python"))
    lines = capsys.readouterr().out
    parts = configure(words + str(tmp_path / "parts"))
    short = dataclasses.replace(parts.training, steps=5)
    trainer.main(dataclasses.replace(parts, training=short), Launch("python"))
    again = dataclasses.replace(parts.run, resume="auto")
    trainer.main(dataclasses.replace(parts, run=again), Launch("python"))
    changed = [line for line in capsys.readouterr().out.splitlines() if "changed" in line]
    assert changed == ["options that changed: steps 5 before, 10 now"]

    samples, tokens = data.build(whole).train, 0
    counted, expected = {"a": [0, 0], "b": [0, 0]}, {}
    for step in range(10):
        tokens += 8 * 16
        for k in range(8 * step, 8 * step + 8) if step not in (1, 7) else ():
            own = counted[samples.spans(k)[0].prefix[-1]]
            own[0], own[1] = own[0] + 1, own[1] + 16
        of_corpora = {str(corpora / name): own[1] for name, own in counted.items()}
        epochs = [counted["a"][0] * 16 / 200, counted["b"][0] * 16 / 240]
        expected[step + 1] = (tokens, of_corpora, epochs)
    for out in ("whole", "parts"):
        found = {row["iteration"]: row for row in rows(tmp_path / out) if "loss" in row}
        assert sorted(found) == [1, 3, 4, 5, 6, 7, 9, 10]
        for iteration, row in found.items():
            assert (row["consumed_tokens"], row["corpus_tokens"]) == expected[iteration][:2]
            assert list(row["corpus_epochs"].values()) == expected[iteration][2]
    ours, theirs = (
        {
            (row["iteration"], key): row[key]
            for row in rows(tmp_path / out)
            for key in row
            if key.endswith(("loss", "norm"))
        }
        for out in ("whole", "parts")
    )
    # The part was meant to end at step 5, so it has an evaluation there.
    assert theirs.keys() - ours.keys() == {(5, "whole_loss"), (5, "part_loss")}
    assert {key: theirs[key] for key in ours} == ours
    a, b = expected[10][1].values()
    assert " step 10/10 | loss " in lines
    assert f"\n {corpora / 'a'}: {a} tokens, " in lines
    assert f" | {corpora / 'b'}: {b} tokens, {expected[10][2][1]:.4f} epochs\n" in lines
    assert not [line for line in lines.splitlines() if line.endswith("|")]
    assert "stable order in memory" in lines
    assert f"evaluation set part: 5 of 21 samples of {corpora / 'c'}" in lines
    assert " step 8/10 | whole loss " in lines
    assert_tensorboard(tmp_path / "whole" / "tensorboard", corpora)


def assert_tensorboard(folder: Path, corpora: Path) -> None:
    """Sets and corpora have tags of their own."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"whole_loss", "part_loss"} <= tags
    names = [corpora / name for name in "ab"]
    assert {
        f"{kind}/{name}" for kind in ("corpus_tokens", "corpus_epochs") for name in names
    } <= tags
    assert [event.step for event in events.Scalars("whole_loss")] == [4, 8, 10]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"tokens": 1}',
        '{"tokens": -1, "corpora": {}}',
        '{"tokens": 1.5, "corpora": {}}',
        '{"tokens": true, "corpora": {}}',
        '{"tokens": 1, "corpora": {"a": [1]}}',
        '{"tokens": 1, "corpora": {"a": [1, NaN]}}',
        '{"tokens": 1, "corpora": {"a": 3}}',
        "[" * 100_000,
    ],
)
def test_a_text_that_counts_no_tokens(text):
    with pytest.raises(ValueError, match="count"):
        Usage.from_text(text)


def test_blends_count_their_samples_by_corpus(corpora):
    """By weight, by size over several epochs, and where a corpus is named twice."""
    a, b = corpora / "a", corpora / "b"
    for blend in (f"{a}", f"0.3 {a} 0.7 {b}", f"{a} {b}", f"1 {a} 2 {b} 1 {a}"):
        samples = data.build(configure(f"--steps 9 --split 1 --cache none --data {blend}")).train
        for first, stop in ((0, 72), (0, 1), (5, 13), (20, 70), (9, 9)):
            wanted = Counter(samples.file_of(k)[: -len(".bin")] for k in range(first, stop))
            found = samples.count_by_corpus(first, stop)
            assert {name: n for name, n in found.items() if n} == wanted, (blend, first, stop)
    assert data.build(configure("--steps 9")).train.count_by_corpus(0, 8) == {}


# ------------------------------------------------------------------------------------------------
# Words and mistakes
# ------------------------------------------------------------------------------------------------


def test_words_of_evaluation_sets():
    assert parse_eval_sets(("a=x/y", "b-2.0=x:y:12", "c=x=3")) == [
        ("a", "x/y", None),
        ("b-2.0", "x:y", 12),
        ("c", "x=3", None),
    ]


def test_mistakes_that_only_the_corpora_show(corpora):
    c = corpora / "c"
    for words, sentence in (
        (f"--steps 3 --cache none --eval-data c={c}:22", "asks for 22 samples, .*c has 21 of 16"),
        (f"--steps 3 --cache none --eval-data c={c}x", "cx.idx"),
    ):
        with pytest.raises(UserError, match=sentence):
            data.build(configure(words))
