"""Options of the test run, its parts that run at once, and what not every machine has."""

import collections
import itertools
import os
import signal

import hypothesis
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


# The fixtures of what the machine has once. One process runs all tests that use such a fixture.
TOGETHER = ("slurm", "cuda_device")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config, items):
    """In a process of several: the tests of TOGETHER first, then the files with most slow tests."""
    if not hasattr(config, "workerinput"):
        return
    for item, fixture in itertools.product(items, TOGETHER):
        if fixture in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group(fixture))
    together = {item for item in items if item.get_closest_marker("xdist_group")}
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item not in together, -slow[item.path]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each process takes one part after the other: a file, or all tests of an entry of TOGETHER."""
    from xdist.scheduler import LoadGroupScheduling

    class Parts(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)  # a test that is in no group is one by itself
            return nodeid.partition("::")[0] if group == nodeid else group

    return Parts(config, log)


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
    """The three-node Slurm of scripts/slurm_here.sh is there.

    A test that asks for it only when it runs needs the mark xdist_group("slurm").
    """
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
