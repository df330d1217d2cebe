"""Options of the test run, its parts that run at once, and what not every machine has."""

import collections

import pytest
import ranks


def pytest_addoption(parser):
    parser.addoption(
        "--full-golden",
        action="store_true",
        help="the golden test over the full product of its options, not every pair (half an hour)",
    )
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


# Tests that use what the machine has once, and so run one after the other.
SHARED = ("slurm", "cuda_device")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """In a process of several: groups of what is shared first, then files with most slow tests."""
    if not hasattr(config, "workerinput"):
        return
    slow: collections.Counter = collections.Counter()
    for item in items:
        slow[item.path] += item.get_closest_marker("slow") is not None
        for name in SHARED:
            if name in item.fixturenames:
                item.add_marker(pytest.mark.xdist_group(name))
    grouped = [item for item in items if item.get_closest_marker("xdist_group")]
    alone = [item for item in items if not item.get_closest_marker("xdist_group")]
    items[:] = grouped + sorted(alone, key=lambda item: -slow[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A process has a whole group, or else a whole file, whose fixtures its tests share."""
    from xdist.scheduler import LoadGroupScheduling

    class GroupsAndFiles(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if scope == nodeid else scope

    return GroupsAndFiles(config, log)


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
