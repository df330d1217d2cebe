"""Options of the test run."""


def pytest_addoption(parser):
    parser.addoption(
        "--full-golden",
        action="store_true",
        help="the golden test over the full product of its options, not every pair (half an hour)",
    )
