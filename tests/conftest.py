"""Options of the test run, its parts that run at once, and what not every machine has."""

import collections
import itertools
import os
import signal

import hypothesis
import leftovers
import pytest
import ranks

# Before torch is imported. The threads of OpenMP that wait for each other keep their cores busy:
# where other processes want these cores, a step of a small model then takes seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Under nohup SIGHUP is ignored, and SIGINT in the background of a script, also by the processes
# that tests start and send these signals to.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# By default hypothesis fails an example that takes 200 ms, as one does on a busy machine.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")


def pytest_configure(config):
    leftovers.end_with_this_process()


def pytest_addoption(parser):
    parser.addoption(
        "--need-slurm",
        action="store_true",
        help="fail, and do not skip, where tests that start ranks with srun find no Slurm",
    )
    parser.addoption(
        "--rehearse-cuda",
        action="store_true",
        help="run the tests marked cuda on the CPU, over gloo, as far as they can",
    )


# By fixture of what the machine has once: the files whose tests use it. One process runs them all.
TOGETHER = {
    "slurm": (
        "lost_nodes",
        "slurm",
        "growth",
        "cluster",
        "launches",
        "audit",
        "batch_file",
        "check_cluster",
    ),
    "cuda_device": ("cuda", "nccl"),
}


def pytest_collection_modifyitems(config, items):
    """In a process of several: the files of TOGETHER first, then those with most slow tests."""
    if not hasattr(config, "workerinput"):
        return
    for item, (name, files) in itertools.product(items, TOGETHER.items()):
        if name in item.fixturenames and item.path.stem.removeprefix("test_") not in files:
            raise pytest.UsageError(f"{item.path} uses {name}: name it in TOGETHER of conftest.py")
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (part(item.nodeid) not in TOGETHER, -slow[item.path]))


def part(nodeid: str) -> str:
    """Return the name of the part that a test is in: its file, or an entry of TOGETHER.

    One process runs all tests of a part.
    """
    file = nodeid.partition("::")[0]
    stem = file.rpartition("/")[2].removeprefix("test_").removesuffix(".py")
    return next((name for name, files in TOGETHER.items() if stem in files), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each process takes one part after the other."""
    from xdist.scheduler import LoadFileScheduling

    class Parts(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return part(nodeid)

    return Parts(config, log)


SECONDS_TO_WAIT = 240  # of one test; a busy machine takes seconds


@pytest.fixture
def ends():
    """A test that waits for a pipe without an end fails, and does not hang.

    A call of the system is interrupted by the signal; Python's handler raises then.
    """

    def ring(number, frame):
        pytest.fail(f"the test has waited for {SECONDS_TO_WAIT} s: it opens what it should refuse")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS_TO_WAIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def cuda_device(request) -> str:
    """The device of a test marked cuda: cuda, or cpu with --rehearse-cuda; skipped without."""
    import torch  # with --help and a mistake it is not needed

    if request.config.getoption("--rehearse-cuda"):
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} finds no CUDA device; --rehearse-cuda tries on CPU")
    return "cuda"


@pytest.fixture(scope="session")
def slurm(request):
    """The three-node Slurm of scripts/slurm_here.sh is there."""
    reason = ranks.why_no_slurm()
    if reason and request.config.getoption("--need-slurm"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def openmpi():
    """A second MPI, Open MPI, is there to start ranks with."""
    if not ranks.OPENMPI.exists():
        pytest.skip(f"no {ranks.OPENMPI}: the machine has an MPI of its own")
