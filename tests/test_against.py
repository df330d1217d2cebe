"""runs.py against: if this failed, a stranger's run would be called the known one, or a right run
would not.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from ranks import ROOT, fork_ranks

import runs
from base.errors import UserError
from config import command_line, validation
from corpora.token_files import IndexedDatasetWriter, checksums_of
from tools.numerics import against

SHAPE = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 61 --device cpu --lr 1e-2"
OPTIONS = f"{SHAPE} --global-batch-size 4 --steps 30 --eval-every 10 --eval-samples 16"
SPLIT = "--split 80,20,0"


def write_corpus(prefix: Path, seed: int) -> None:
    """Write texts of a few frequent tokens, so that a model learns something."""
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(str(prefix), 61) as writer:
        for size in random.integers(20, 60, size=80):
            writer.add_document(random.zipf(1.5, size=size).clip(1, 60))
    Path(f"{prefix}.sha256").write_bytes(checksums_of(str(prefix)))


def train(out: Path, words: str, ranks: int = 1) -> None:
    command = [*OPTIONS.split(), *SPLIT.split(), *words.split(), "--out", str(out)]
    done = fork_ranks(ranks, "train.py", *command)
    assert done.status == 0, done.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A recipe of three seeds, and a corpus beside it."""
    made = tmp_path_factory.mktemp("against")
    for seed, name in enumerate(("texts", "others")):
        write_corpus(made / name, seed)
    for seed in (1, 2, 3):
        train(made / f"recipe/seed-{seed}", f"--data {made}/texts --seed {seed}")
    shutil.copy(made / "texts.sha256", made / "recipe/corpus.sha256")
    return made


def found_of(folder: Path, name: str, words: str = "", ranks: int = 1, data: str = "texts"):
    train(folder / name, f"--data {folder}/{data} {words}", ranks)
    return against.compare(folder / "recipe", folder / name)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [("--tp 2", 2), ("--zero 2 --micro-batch-size 2", 2)],
)
def test_a_layout_is_equal_to_rounding(words, ranks, folder):
    found = found_of(folder, f"layout{words[:4]}", f"--seed 2 {words}", ranks)
    said = found["verdict"], found["first"], found["options"]
    assert said == ("equal", None, []), found
    assert found["rounding"], "the layout differs"


@pytest.mark.parametrize(("last", "verdict"), [(12, "equal"), (30, "other")])
def test_the_norm_of_one_step_is_rounding_and_of_all_that_follow_is_not(folder, last, verdict):
    """With tp 2 and on another processor one norm of 30 was off by 7e-5, and the next by 1e-7."""
    run = folder / f"norms-{last}"
    shutil.copytree(folder / "recipe/seed-2", run)
    rows = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    for row in rows:
        if "grad_norm" in row and 12 <= row["iteration"] <= last:
            row["grad_norm"] *= 1.001
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert against.compare(folder / "recipe", run)["verdict"] == verdict


def test_another_seed_and_a_coarser_precision_are_equal_in_law(folder):
    found = found_of(folder, "seed", "--seed 9")
    assert (found["verdict"], found["law"], found["options"]) == ("law", [], [])
    found = found_of(folder, "coarse", "--seed 9 --precision bf16")
    assert found["verdict"] == "law"
    assert ["precision", "fp32", "bf16"] in found["rounding"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--lr 1.1e-2", ["lr", 1e-2, 1.1e-2]),
        ("--set norm_eps=1e-3", ["norm_eps", 1e-5, 1e-3]),
        ("--reset-attention --eod-token 1", ["reset_attention", False, True]),
        ("--weight-decay 0.0", ["weight_decay", 0.1, 0.0]),
        ("--split 70,30,0", ["split", "80,20,0", "70,30,0"]),
    ],
)
def test_a_spoiled_option_is_named(words, named, folder):
    for seed in (1, 9):
        found = found_of(folder, f"spoiled {named[0]} {seed}", f"--seed {seed} {words}")
        assert found["verdict"] == "other"
        assert named in found["options"]


def test_another_corpus_is_named(folder):
    for seed in (1, 9):
        found = found_of(folder, f"other corpus {seed}", f"--seed {seed}", data="others")
        assert found["verdict"] == "other"
        assert found["data"]
    (folder / "others.sha256").rename(folder / "kept")  # a corpus from elsewhere
    found = against.compare(folder / "recipe", folder / "other corpus 1")
    assert found["data"] == "sample 1 of the run is another text"
    (folder / "kept").rename(folder / "others.sha256")


@pytest.mark.parametrize(("text", "how"), [("{}", "it has another"), ("[]", "other texts")])
def test_another_tokenizer_is_told_from_other_texts(text, how, folder, tmp_path):
    """The recipe has the checksum of its tokenizer.json too."""
    recipe = tmp_path / "recipe"
    shutil.copytree(folder / "recipe", recipe)
    checksum = hashlib.sha256(b"[]").hexdigest()
    with (recipe / "corpus.sha256").open("a") as file:
        file.write(f"{checksum}  texts.tokenizer.json\n")
    tokenizer = folder / "others.tokenizer.json"
    tokenizer.write_text(text)
    found = against.compare(recipe, folder / "other corpus 1")
    tokenizer.unlink()
    assert how in found["data"]
    assert found["data"].endswith("tokenizer")
    assert against.compare(recipe, recipe / "seed-1")["verdict"] == "equal"


@pytest.mark.parametrize(("factor", "until"), [(1.001, 12), (1.3, 25), (float("nan"), 5)])
def test_a_fault_in_the_code_is_named_by_its_step(factor, until, folder):
    """A run of the same options whose loss is another one from a step on."""
    name = f"fault {factor}"
    shutil.copytree(folder / "recipe/seed-1", folder / name)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
    for row in rows:
        if "loss" in row and row["iteration"] > until:
            row["loss"] *= factor
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = against.compare(folder / "recipe", folder / name)
    assert found["verdict"] == "other"
    assert found["first"]["step"] == until + 1


@pytest.mark.parametrize("crossing", [None, 0, 1, 2])
def test_rounding_that_grows_is_no_fault(crossing, folder):
    """In many steps, or in 16 bits, rounding grows beyond what a few steps explain.

    crossing: the run's losses are those of the recipe in each third step, as where they cross.
    """
    shutil.copytree(folder / "recipe/seed-1", folder / "grown", dirs_exist_ok=True)
    rows = [json.loads(line) for line in (folder / "grown/metrics.jsonl").open()]
    for row in rows:
        if "loss" in row and row["iteration"] % 3 != crossing:
            row["loss"] *= 1 + 1e-9 * 2 ** row["iteration"] / 2**10
    (folder / "grown/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = against.compare(folder / "recipe", folder / "grown")
    assert found["verdict"] == "law"
    assert "rounding has grown until here" in against.text(found)


def test_the_command_and_its_mistakes(folder, capsys):
    words = [str(folder / "recipe"), str(folder / "recipe/seed-1")]
    assert runs.run_command(["against", *words]) == 0
    assert capsys.readouterr().out == "equal to rounding: this is the known run\n"
    assert runs.run_command(["against", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "equal"
    with pytest.raises(UserError, match="has 0 folders seed-N: a recipe has at least two"):
        against.compare(folder, folder / "recipe/seed-1")


@pytest.mark.parametrize("recipe", sorted(p.parent.name for p in ROOT.glob("recipes/*/run.toml")))
def test_a_recipe_is_whole_and_each_of_its_seeds_is_itself(recipe):
    """A page says that a recipe was not run exactly if it has no seeds; its options are a run's."""
    path = ROOT / "recipes" / recipe
    config = command_line.parse(["--config", str(path / "run.toml"), "--vocab-size", "512"])
    validation.check(config, 1)
    seeds = sorted(path.glob("seed-*"))
    assert len(seeds) == 3 * ("Not run yet" not in (path / "README.md").read_text())
    for seed in seeds:
        assert against.compare(path, seed)["verdict"] == "equal"
        facts = json.loads((seed / "run.json").read_text())
        assert facts["config"]["training"]["seed"] == int(seed.name[-1])
        assert facts["config"]["model"]["layers"] == config.model.layers
        assert facts["config"]["training"]["lr"] == config.training.lr
