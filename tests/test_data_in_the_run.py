"""If this failed, evaluations and tokens by corpus would be counted wrong."""

import json
from pathlib import Path

import pytest
import torch
from small_corpora import write_corpora
from test_golden import check_lines

import data
import trainer
from config import validation
from config.command_line import parse
from corpora.usage import Usage
from distributed.launch import Launch


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
    """The folder of the three small corpora."""
    folder = tmp_path_factory.mktemp("corpora")
    write_corpora(folder)
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
    shape = "--layers 1 --hidden 8 --heads 2 --seq-length 16 --vocab-size 61 "
    shape += "--set pad_vocab_multiple=4 "
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
    spans = [span for k in range(count) for span in samples.spans(k)]
    assert sum(span.length for span in spans) == 21 * 17  # neighbours share a token
    total = 0.0
    with torch.no_grad():
        for k in range(count):
            row = torch.from_numpy(samples.sample(k))[None]
            batch = data.Batch(row[:, :-1], row[:, 1:], 16)
            total += state.stages[0](batch.tokens, batch).item()
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
    whole = configure(words + str(tmp_path / "whole"))
    trainer.main(whole, Launch("python"))
    lines = capsys.readouterr().out
    for more in (" --steps 5", " --resume auto"):
        trainer.main(configure(words + str(tmp_path / "parts") + more), Launch("python"))
    changed = [line for line in capsys.readouterr().out.splitlines() if "changed" in line]
    assert changed == ["options that changed: steps 5 before, 10 now"]

    samples = data.build(whole).train
    counted, expected = {"a": 0, "b": 0}, {}
    for step in range(10):
        for k in range(8 * step, 8 * step + 8) if step not in (1, 7) else ():
            counted[samples.spans(k)[0].prefix[-1]] += 16
        of_corpora = {str(corpora / name): tokens for name, tokens in counted.items()}
        epochs = [counted["a"] / 200, counted["b"] / 240]
        expected[step + 1] = [8 * 16 * (step + 1), of_corpora, epochs]
    losses = []
    for out in ("whole", "parts"):
        every = rows(tmp_path / out)
        found = {
            row["iteration"]: [
                row["consumed_tokens"],
                row["corpus_tokens"],
                [*row["corpus_epochs"].values()],
            ]
            for row in every
            if "loss" in row
        }
        assert found == {i: values for i, values in expected.items() if i not in (2, 8)}
        names = ("loss", "grad_norm", "whole_loss", "part_loss")
        losses.append({(r["iteration"], n): r[n] for r in every for n in names if n in r})
    # The part was meant to end at step 5, so it has an evaluation there.
    assert losses[1].keys() - losses[0].keys() == {(5, "whole_loss"), (5, "part_loss")}
    assert {key: losses[1][key] for key in losses[0]} == losses[0]
    a, b = counted.values()
    assert f"\n {corpora / 'a'}: {a} tokens, " in lines
    assert f" | {corpora / 'b'}: {b} tokens, {expected[10][2][1]:.4f} epochs\n" in lines
    assert f"evaluation set part: 5 of 21 samples of {corpora / 'c'}" in lines


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


# ------------------------------------------------------------------------------------------------
# Words and mistakes
# ------------------------------------------------------------------------------------------------
