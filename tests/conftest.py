"""Options of the test run, and what a test may need that not every machine has."""

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
