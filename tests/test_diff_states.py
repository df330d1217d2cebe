"""runs.py diff of checkpoints, and of a run with its restart: if this failed, a difference between
two saved states, or between the steps before a stop and after it, would not be shown.
"""

import json
from pathlib import Path

import pytest
from ranks import fork_ranks

import runs
from base.errors import UserError
from tools.numerics import diff, states

SHAPE = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 61 --device cpu"
OPTIONS = f"{SHAPE} --global-batch-size 4 --save-every 2"


def train(out: Path, words: str = "", ranks: int = 1) -> None:
    arguments = [*OPTIONS.split(), *words.split(), "--out", str(out)]
    done = fork_ranks(ranks, "train.py", *arguments)
    assert done.status == 0, done.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two runs of four steps in different layouts, and a third of another width."""
    made = tmp_path_factory.mktemp("states")
    train(made / "one", "--steps 4")
    train(made / "two", "--steps 4 --tp 2", ranks=2)
    train(made / "narrow", "--steps 4 --hidden 8 --vocab-size 31")
    return made


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def test_states_of_two_layouts_differ_by_rounding_and_a_state_equals_itself(folder, capsys):
    found = states.compare(checkpoint(folder / "one", 4), folder / "two")
    assert found["checkpoints"][1] == str(checkpoint(folder / "two", 4))
    assert found["options"] == [["tp", 1, 2]]
    assert len(found["tensors"]) == 3 * 16  # weights and two moments
    weights = {row["name"]: row["relative"] for row in found["tensors"] if row["kind"] == "weights"}
    assert 0 < weights["blocks.0.mlp.up.weight"] < 1e-6
    same = [str(checkpoint(folder / "one", 2))] * 2
    assert runs.run_command(["diff", *same]) == 0
    assert "weights: all 16 tensors are equal bit for bit" in capsys.readouterr().out


def test_states_of_two_steps_name_the_tensor_that_moved_most(folder, capsys):
    pair = [str(checkpoint(folder / "one", step)) for step in (2, 4)]
    assert runs.run_command(["diff", *pair, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [2, 4]
    assert ["progress iteration", 2, 4] in found["options"]
    largest = max(found["tensors"], key=lambda row: row["relative"])
    assert largest["relative"] > 1e-3
    assert runs.run_command(["diff", *pair]) == 1
    assert f"{largest['relative']:.1e}  {largest['name']}" in capsys.readouterr().out


def test_states_that_cannot_be_compared_are_one_sentence(folder):
    (folder / "short/checkpoints").mkdir(parents=True)
    checkpoint(folder / "short", 2).symlink_to(checkpoint(folder / "two", 2))
    with pytest.raises(UserError, match=r"is of step 4; .*/short has checkpoints of steps 2$"):
        states.compare(checkpoint(folder / "one", 4), folder / "short")
    with pytest.raises(UserError, match="have no tensor of the same name and shape"):
        states.compare(checkpoint(folder / "one", 4), folder / "narrow")


def test_a_restart_is_compared_with_the_steps_before_the_stop(tmp_path):
    out = tmp_path / "run"
    train(out, "--steps 5")
    with pytest.raises(UserError, match="has no earlier part of a run"):
        diff.compare_restart(out)
    train(out, f"--steps 5 --resume {checkpoint(out, 2)}")
    found = diff.compare_restart(out)
    assert not found["differs"]
    assert found["options"] == found["commands"] == []
    assert diff.text(found).endswith("losses and gradient norms: rounding explains all differences")
    train(out, f"--steps 5 --lr 1e-2 --resume {checkpoint(out, 2)}")
    found = diff.compare_restart(out)
    assert found["settings"][0]["step"] == 3
    assert found["losses"]["step"] == 4
    assert [name for name, *_ in found["options"]] == ["lr"]
    before, after = found["commands"]
    assert f"--out {out}-traced-before --trace-numerics 3 4" in before
    assert f"--out {out}-traced-after --trace-numerics 3 4" in after
    train(out, f"--steps 8 --resume {checkpoint(out, 5)}")
    with pytest.raises(UserError, match="it has trained no step twice"):
        diff.compare_restart(out)
