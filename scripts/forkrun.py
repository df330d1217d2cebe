"""Starts the ranks of one machine as forks of one Python process that has imported torch.

    python scripts/forkrun.py 8 train.py --tp 2 ...

Importing torch takes most of the start-up of a short run. Under mpirun every rank imports it; here
ranks are forked after the import, with the environment variables of torchrun. Made for many short
trials of tune.py on one machine without GPUs. A rank that fails ends the others; the exit status is
that of the first failure.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

SECONDS_TO_END = 6.0  # for the other ranks to end by themselves when one has failed
USAGE = "usage: python scripts/forkrun.py RANKS PROGRAM.py [ARGUMENTS]"


def main(arguments: list[str]) -> int:
    """Run PROGRAM on that many forked ranks; the exit status of the job."""
    if len(arguments) < 2 or not arguments[0].isdigit() or int(arguments[0]) < 1:
        print(USAGE, file=sys.stderr)
        return 2
    ranks, words = int(arguments[0]), arguments[1:]
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    # The forked ranks have torch and the modules imported; its optimizers but AdamW import _dynamo.
    import torch._dynamo  # noqa: F401

    import trainer  # noqa: F401
    from distributed.local_ranks import free_port

    port = free_port()
    alive = {_fork(rank, ranks, port, words) for rank in range(ranks)}
    signal.signal(signal.SIGTERM, lambda *_: _kill(alive))
    try:
        return _wait(alive)
    finally:
        _kill(alive)


def _fork(rank: int, ranks: int, port: int, words: list[str]) -> int:
    """Fork a rank and return its process id; does not return in the rank."""
    child = os.fork()
    if child:
        return child
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "fork"}
    os.environ.update({name: str(value) for name, value in places.items()})
    sys.argv = words
    status = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # print the traceback and fail, as Python does at the top level
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(alive: set[int]) -> int:
    """Exit status of the first rank that failed, or 0; the others get SECONDS_TO_END."""
    status, limit = 0, None
    while alive and (limit is None or time.monotonic() < limit):
        child, state = os.waitpid(-1, os.WNOHANG)
        if not child:
            time.sleep(0.02)
            continue
        alive.discard(child)
        code = os.waitstatus_to_exitcode(state)
        if code and not status:
            status = code if code > 0 else 128 - code  # for a signal, as in a shell
            limit = time.monotonic() + SECONDS_TO_END
    return status


def _kill(alive: set[int]) -> None:
    for child in alive:  # not waited for yet, so the process ids are still in use
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
