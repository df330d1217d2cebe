"""runs.py diff RUN --with-transformers FOLDER: if this failed, an imported model would be accused,
or a layer that differs would not be named.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import fork_one
from test_families import S, V, their_model

import runs
from checkpointing import hf_export
from corpora.token_files import IndexedDatasetWriter

FAMILIES = ("gpt2", "bloom", "llama", "gpt_neox", "opt", "olmo2", "mixtral")
# The first block of each has the mixer in the place of attention.
HYBRIDS = ("lfm2", "qwen3_next")


def traced_run(folder: Path, family: str, options: str = "") -> tuple[Path, Path]:
    """Return transformers' folder of a random model, and a run that was trained from its weights
    for one traced step.
    """
    their_model(family).save_pretrained(folder / "theirs")
    hf_export.import_weights(str(folder / "theirs"), str(folder / "imported"))
    words = f"--model {folder}/theirs --resume {folder}/imported/step_00000000 --load-weights-only"
    words += (
        f" --steps 1 --vocab-size {V} --seq-length {S} --global-batch-size 4 --trace-numerics 1"
    )
    words += f" --device cpu --out {folder}/run {options}"
    done = fork_one("train.py", *words.split())
    assert done.status == 0, done.err
    return folder / "run", folder / "theirs"


def diff(run: Path, theirs: Path, capsys, *words: str) -> tuple[int, str]:
    """Return the exit status and the text of the command."""
    status = runs.run_command(["diff", str(run), "--with-transformers", str(theirs), *words])
    return status, capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES + HYBRIDS)
def test_an_imported_model_is_that_of_transformers(family, tmp_path, capsys):
    run, theirs = traced_run(tmp_path, family)
    status, text = diff(run, theirs, capsys)
    assert status == 0, text
    assert "rounding explains all tensors of step-000001.npz" in text


def test_transformers_reads_the_corpus_of_the_run(tmp_path, capsys):
    """Not random tokens, with which every tensor would differ."""
    random = np.random.default_rng(1)
    with IndexedDatasetWriter(str(tmp_path / "corpus"), V) as writer:
        for _ in range(40):
            writer.add_document(random.integers(V, size=2 * S))
    run, theirs = traced_run(tmp_path, "llama", f"--data {tmp_path}/corpus --split 1,0,0")
    status, text = diff(run, theirs, capsys)
    assert status == 0, text


def test_the_first_layer_that_differs_is_named(tmp_path, capsys):
    run, theirs = traced_run(tmp_path, "llama")
    other = their_model("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[3, 5] += 0.01
    other.save_pretrained(theirs)
    status, text = diff(run, theirs, capsys, "--json")
    tensor = json.loads(text)["tensor"]
    assert status == 1
    assert (tensor["kind"], tensor["name"]) == ("activation", "blocks.1")
    assert tensor["last_good"] == "the output of block 1's attention"
