"""Uses checkpoints in every way and records how each use ends.

    python tests/hostile_worker.py CASES.json RESULTS.json

CASES: {"name": folder}. RESULTS: {"name": {"show": sentence, ...}}, a sentence as UserError has it,
null for a use that succeeded, "TypeError: ..." for any other exception. The uses are those of
checkpoint.py, and loading into a run; of every fifth, the weights only. Forked processes share the
cases.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import checkpoint_worker as worker

import checkpoint
import trainer
from base.errors import UserError
from checkpointing.save import Checkpointer
from config import validation

SHAPE = {"layers": 2, "hidden": 16, "heads": 4, "seq_length": 16, "vocab_size": 61}
PROCESSES = 4
SECONDS = 60  # a use that takes longer counts as a hang


class Hang(BaseException):
    """A use that did not end."""


def ring(number, frame) -> None:
    raise Hang


def result_of(use, *arguments) -> str | None:
    """Return the error that a use raised, as text, or None."""
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            use(*arguments)
    except UserError as error:
        return str(error)
    except (Exception, Hang) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return None


def resume(state: trainer.TrainState, folder: str, weights_only: bool) -> None:
    """Load a checkpoint into the run of this process."""
    options = SHAPE | {"resume": folder, "load_weights_only": weights_only}
    config = validation.check(worker.options(options), 1)
    mesh, lines = state.factory.mesh, []
    Checkpointer(config, mesh, state.optimizer, print_line=lines.append).resume()


def uses(folder: str, state: trainer.TrainState, out: Path, all_uses: bool) -> dict:
    """The results of all uses of one checkpoint; what an export leaves is an exception too."""
    found = {name: result_of(checkpoint.run_command, [name, folder]) for name in ("show", "verify")}
    export = ["export", "--to", "hf", folder, str(out / "hf")]
    found["export"] = result_of(checkpoint.run_command, export)
    if found["export"] is not None and list(out.iterdir()):
        found["export"] = f"left {list(out.iterdir())}"
    shutil.rmtree(out / "hf", ignore_errors=True)
    found["resume"] = result_of(resume, state, folder, False)
    if all_uses:
        found["weights"] = result_of(resume, state, folder, True)
    return found


def use_share(cases: list[tuple[int, tuple[str, str]]], state: trainer.TrainState) -> dict:
    """The results of a process's share of the numbered cases."""
    with tempfile.TemporaryDirectory() as out:
        return {
            name: uses(folder, state, Path(out), number % 5 == 0)
            for number, (name, folder) in cases
        }


def main() -> None:
    signal.signal(signal.SIGALRM, ring)
    cases, target = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    state = trainer.build(validation.check(worker.options(SHAPE), 1))
    children = []
    for share in range(PROCESSES):
        if (child := os.fork()) == 0:
            results = use_share(list(enumerate(cases.items()))[share::PROCESSES], state)
            target.with_suffix(f".{share}").write_text(json.dumps(results))
            os._exit(0)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    if any(ends):
        raise RuntimeError(f"a process ended with a traceback or a signal: {ends}")
    shares = [json.loads(target.with_suffix(f".{n}").read_text()) for n in range(PROCESSES)]
    target.write_text(json.dumps({name: end for share in shares for name, end in share.items()}))


if __name__ == "__main__":
    main()
