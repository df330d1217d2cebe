"""Rates of Megatron-Core by GPU and precision, fitted on all rows of that program.

    python benchmarks/planner/rates.py          # the constants refitted, and without each source

Dense rows and mixtures of experts determine them together: of a GPU with dense rows of one source
alone, its rows of experts say the rest. Each source is then predicted with constants fitted on the
others: a source is a file of rows, or the model of rows of experts. PRIORS are values expected
without any row.
"""

import math
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from base.cli import Parser
from base.errors import sentences
from benchmarks.planner import expert_cases, published_cases, published_rows, stated_rows
from benchmarks.planner.robust_fit import refit, refit_without_each
from benchmarks.planner.source_accuracy import errors
from benchmarks.planner.stated_rows import StatedRow
from costs import hardware

DATA = ROOT / "benchmarks" / "data"
# The dense sources of Megatron-Core's runs, files of data/public; its README's table is "H100".
SOURCES = ("dgxc", "dgxc_2025", "megatron_bridge", "nemo_guide")
README = "H100"
# Values expected without any row, each of which pulls as PULL rows of this logarithm would: an H100
# reaches three fifths of its peak, a later GPU a fifth more for each watt, and fp8 nine tenths of
# what it promises. The meanings are in hardware/fitted.toml.
PRIORS = {
    "h100_gemm_fraction": 0.6,
    "blackwell_per_watt": 1.1e12,
    "blackwell_ultra_per_watt": 1.1e12,
    "hopper_fp8_share": 0.9,
    "blackwell_fp8_share": 0.9,
    "expert_tile": 1e-6,
    "expert_host": 2e-5,
    "expert_scans": 8.0,
}
PULL = 0.2
MOST_STEP = 0.7  # of a constant's logarithm, in one of ROUNDS
ROUNDS = 5


@cache
def fitted_on() -> tuple[StatedRow, ...]:
    """The rows on which the rates are fitted, one of each recipe that versions repeat."""
    rows: list[StatedRow] = []
    for name in SOURCES:
        rows += stated_rows.read(str(DATA / "public" / f"{name}.csv"))
    readme = published_cases.cases(published_rows.read(str(DATA / "measured_rows.csv")))
    rows += [row for row in readme if row.source == README]
    of_experts, _ = expert_cases.read()
    rows += expert_cases.recipes(of_experts)
    return tuple(row for row in rows if row.seconds and not row.aside)


def with_priors(rows: Sequence[StatedRow], at: dict[str, float]) -> list[float]:
    """The errors of some rows, and what the priors add to them."""
    pulls = [PULL * math.log(at[name] / prior) for name, prior in PRIORS.items()]
    return errors(rows, "seconds", at) + pulls


def fit(start: dict[str, float]) -> dict[str, float]:
    """All constants, those of PRIORS refitted on all rows."""
    return refit(partial(with_priors, fitted_on()), tuple(PRIORS), start, ROUNDS, MOST_STEP)


def without_each(start: dict[str, float]) -> dict[str, dict[str, float]]:
    """By source, the constants fitted on the rows of all others, by one step from `start`."""
    names = tuple(PRIORS)
    return refit_without_each(
        fitted_on(), lambda row: row.source, with_priors, names, start, 1, MOST_STEP
    )


def main(arguments: list[str]) -> None:
    """Print the constants as all rows ask for them, and as all rows without a source do."""
    Parser(description=__doc__.splitlines()[0]).parse_args(arguments)
    fitted = fit(dict(hardware.fitted_values()))
    found = {"all": fitted} | without_each(fitted)
    print(f"| without | {' | '.join(PRIORS)} |\n{'|---' * (1 + len(PRIORS))}|")
    for source, values in found.items():
        print(f"| {source} | {' | '.join(f'{values[name]:.3g}' for name in PRIORS)} |")


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
