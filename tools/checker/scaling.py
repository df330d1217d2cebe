"""Do the scales of a model suit every width and depth? check.py --widths and --depths.

    python check.py --widths 64,128,256,512 --mup 64            the coordinate check by width
    python check.py --depths 2,4,8,16 --config RUN.toml         by the number of blocks
    python check.py --widths 64,512 --rates 1e-3:6.4e-2         the transfer check: the best rate at
                                                                each size, and how flat it is

All of train.py's options are taken, and these:

    --widths N,N,...    hidden of the models, multiples of 32, from the smallest on
    --depths N,N,...    blocks of the models; --widths N then says their width (default: 64)
    --updates N         steps after which tensors are compared, 1 to 10; default: 4
    --rates A:B         train at rates A, 2 A, 4 A, ... up to B, in place of comparing tensors
    --factor F          the factor between rates; default: 2
    --runs-of N         steps of a run at a rate; default: 100
    --seeds N           runs of each size that are averaged; default: 2
    --picture FILE      draw it: a .png or .svg (matplotlib)
    --table FILE        write what is printed

Models are small: heads of 16, 32 tokens, a vocabulary of 128, 8 experts; what chooses code stays,
and all widths of a block grow with hidden. The smallest model is the base of muP if the run has
--mup (for depth --mup-base-layers); without it the same lines say which tensors do not scale.

A tensor is right if its size stays: its exponent is printed beside the one that it should have, and
the line says whether it grows or dies. tools/checker/coordinates.py says what a size is.

Exit status: 0 if every exponent is right, or if the best rate moves by one place of the grid or
less; 1 if not; 2 a mistake.
"""

import math
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base import errors
from base.cli import Parser
from base.errors import PackageError, UserError
from config.command_line import Request
from config.schema import Config
from distributed import local_ranks
from tools.checker.sizes import HEAD, LEAST, LENGTH, VOCABULARY, Ladder

if TYPE_CHECKING:
    from tools.checker.coordinates import Fitted

OPTIONS = ("--widths", "--depths")
MOST_UPDATES = 10
RATE = 4e-3  # of the coordinate check, if the run has none
MOST_RATES = 24


def is_asked(arguments: Sequence[str]) -> bool:
    """Return whether a command line of check.py asks for one of these checks."""
    return any(word.partition("=")[0] in OPTIONS for word in arguments)


def main(arguments: list[str], request_of: Callable[[list[str]], Request]) -> int:
    """Do the check that the arguments ask for, print it, and return the exit status.

    request_of: makes the run of train.py's options. Raise UserError if an option is wrong.
    """
    if not {"-h", "--help"}.isdisjoint(arguments):
        print(__doc__)
        return 0
    given, of_train = _parser().parse_known_args(arguments)
    request = request_of(of_train)
    widths = _numbers("--widths", given.widths or "64")
    depths = _numbers("--depths", given.depths or "2")
    if len(widths) > 1 and given.depths is not None and len(depths) > 1:
        raise UserError(
            f"give several --widths or several --depths: {given.widths} and {given.depths} are both"
        )
    by_depth = given.depths is not None and len(widths) == 1
    sizes = depths if by_depth else widths
    if len(sizes) < 2:
        flag = "--depths" if by_depth else "--widths"
        raise UserError(f"{flag} takes two sizes or more, such as 64,128: not {sizes[0]}")
    _check_options(given)
    local_ranks.prepare()
    ladder = Ladder(request.config, widths[0], depths[0])
    lines = [_introduction(request.config, ladder, sizes, by_depth)]
    print(lines[0], flush=True)

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    if given.rates:
        status = _transfer(ladder, given, sizes, by_depth, say)
    else:
        rate = request.config.training.lr if "lr" in request.given else RATE
        status = _coordinates(ladder, given, sizes, by_depth, rate, say)
    if given.table:
        Path(given.table).write_text("\n".join(lines) + "\n")
    return status


def _parser() -> Parser:
    """Return the parser of the options that are not train.py's."""
    parser = Parser("check.py", add_help=False, allow_abbrev=False)
    for name in ("widths", "depths", "rates", "picture", "table"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--runs-of", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    return parser


def _numbers(flag: str, text: str) -> list[int]:
    """Return the sizes of a flag, ascending; UserError if they are no whole numbers."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(
            f"{flag} takes whole numbers such as 64,128,256, with commas, not {text!r}"
        ) from None
    if sorted(set(numbers)) != numbers or numbers[0] < 1:
        raise UserError(f"{flag} goes from the smallest to the largest, each above 0: not {text}")
    for number in numbers if flag == "--widths" else ():
        if number % LEAST:
            raise UserError(f"--widths are multiples of {LEAST}, two heads of 16: not {number}")
    return numbers


def _check_options(given: Namespace) -> None:
    """Raise UserError if an option is out of range."""
    if not 1 <= given.updates <= MOST_UPDATES:
        raise UserError(f"--updates is from 1 to {MOST_UPDATES}, not {given.updates}")
    if given.seeds < 1:
        raise UserError(f"--seeds is at least 1, not {given.seeds}")
    if given.runs_of < 10:
        raise UserError(f"--runs-of is at least 10 steps, not {given.runs_of}")
    if not given.factor > 1:
        raise UserError(f"--factor is above 1, not {given.factor:g}")


def rates_of(text: str, factor: float) -> tuple[float, ...]:
    """Return the rates A, A F, A F^2, ... up to B of a text A:B; UserError if it is no such."""
    low, colon, high = text.partition(":")
    try:
        first, last = float(low), float(high)
    except ValueError:
        raise UserError(f"--rates takes A:B such as 1e-3:6.4e-2, not {text!r}") from None
    if not colon or not 0 < first < last < float("inf"):
        raise UserError(f"--rates A:B goes from a rate above 0 to a larger one, not {text}")
    rates = [first]
    while rates[-1] * factor <= last * 1.001:
        rates.append(rates[-1] * factor)
        if len(rates) > MOST_RATES:
            raise UserError(
                f"--rates {text} is more than {MOST_RATES} rates by a factor {factor:g}"
            )
    if len(rates) < 3:
        raise UserError(
            f"--rates {text} is {len(rates)} rates by a factor {factor:g}: give 3 or more"
        )
    return tuple(rates)


def _introduction(config: Config, ladder: Ladder, sizes: list[int], by_depth: bool) -> str:
    """Return the first printed line: the sizes, the optimizer and the muP options compared."""
    what = "blocks" if by_depth else "widths"
    other = f"width {ladder.width}" if by_depth else f"{ladder.layers} blocks"
    base = {"--mup": config.model.mup, "--mup-base-layers": config.model.mup_base_layers}
    named = " ".join(flag for flag, value in base.items() if value) or "no muP"
    optimizer = config.training.optimizer
    small = f"small: heads of {HEAD}, {LENGTH} tokens, a vocabulary of {VOCABULARY}, fp32"
    return f"{what} {', '.join(map(str, sizes))}, {other}, {optimizer}, {named}; {small}"


# ---- The coordinate check ------------------------------------------------------------------------


def _coordinates(
    ladder: Ladder,
    given: Namespace,
    sizes: list[int],
    by_depth: bool,
    rate: float,
    say: Callable[[str], None],
) -> int:
    """Compare the sizes of tensors, print them and the verdict, and return the exit status."""
    with errors.installed():
        from tools.checker.coordinates import compare

    began = time.monotonic()
    rows = compare(ladder, sizes, by_depth, given.seeds, given.updates, rate)
    for line in table(rows, sizes):
        say(line)
    for line in verdict(rows, sizes, by_depth, time.monotonic() - began):
        say(line)
    if given.picture:
        _draw_sizes(rows, sizes, "blocks" if by_depth else "width", given.picture)
    return int(any(row.verdict for row in rows))


def table(rows: "Sequence[Fitted]", sizes: Sequence[int]) -> list[str]:
    """Return the printed table: for each tensor its size at each width or depth, and exponent."""
    names = max(len(row.name) for row in rows)
    head = " ".join(f"{size:>9d}" for size in sizes)
    lines = [f"{'':10s} {'':{names}s} {'class':15s} {head}  exponent  right"]
    for row in rows:
        values = " ".join(f"{value:9.3g}" for value in row.sizes)
        end = f"{row.exponent:+8.2f}  {right(row):>10s}  {row.verdict}"
        lines.append(
            f"{row.quantity:10s} {row.name:{names}s} {row.kind:15s} {values}  {end}".rstrip()
        )
    return lines


def right(row: "Fitted") -> str:
    """Return the exponents with which a size is right."""
    if row.least == 0:
        return "0"
    return "up to 0" if math.isinf(row.least) else f"{row.least:g} to 0"


def verdict(
    rows: "Sequence[Fitted]", sizes: Sequence[int], by_depth: bool, seconds: float
) -> list[str]:
    """Return the lines that say which tensors grow or die, with their classes."""
    by = "blocks" if by_depth else "width"
    wrong = [row for row in rows if row.verdict]
    span = f"from {by} {sizes[0]} to {sizes[-1]}"
    if not wrong:
        return [f"right: {len(rows)} sizes of tensors stay {span} ({seconds:.0f} s)"]
    tensors = [row for row in wrong if row.kind]
    lines = [f"WRONG: {len(wrong)} of {len(rows)} sizes change {span} ({seconds:.0f} s)"]
    by_kind: dict[str, list[Fitted]] = {}
    for row in tensors:
        by_kind.setdefault(row.kind, []).append(row)
    for kind, of_kind in by_kind.items():
        for row in of_kind:
            lines.append(
                f"  {kind}: the {row.quantity} size of {row.name} {row.verdict}, as {by} to the "
                f"power of {row.exponent:+.2f}; right is {right(row)}"
            )
    activations = [row for row in wrong if not row.kind]
    if activations:
        first = activations[0]
        changed = f"the {first.quantity} of {first.name} {first.verdict} ({first.exponent:+.2f})"
        lines.append(f"  activations: {changed}, and {len(activations) - 1} other sizes")
    if not tensors:
        lines.append("  no tensor's own scale is off: look at the factors of the forward pass")
    return lines


def _draw_sizes(rows: "Sequence[Fitted]", sizes: list[int], by: str, path: str) -> None:
    """Draw the sizes of tensors over those of the models, a panel for each quantity."""
    plt = _matplotlib()
    quantities = list(dict.fromkeys(row.quantity for row in rows))
    figure, axes = plt.subplots(1, len(quantities), figsize=(4 * len(quantities), 4))
    for ax, quantity in zip(axes, quantities, strict=True):
        for row in rows:
            if row.quantity == quantity:
                style = {"color": "tab:red", "label": row.name} if row.verdict else {"color": "0.6"}
                relative = [value / row.sizes[0] for value in row.sizes]
                ax.plot(sizes, relative, marker=".", linewidth=1, **style)
        ax.set(xscale="log", yscale="log", xlabel=by, title=quantity)
        ax.set_xticks(sizes, map(str, sizes), minor=False)
        ax.set_ylim(bottom=min(0.1, ax.get_ylim()[0]), top=max(10, ax.get_ylim()[1]))
        if any(row.verdict and row.quantity == quantity for row in rows):
            ax.legend(fontsize=5)
    axes[0].set_ylabel("size over that of the smallest model")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# ---- The transfer check --------------------------------------------------------------------------


def _transfer(
    ladder: Ladder, given: Namespace, sizes: list[int], by_depth: bool, say: Callable[[str], None]
) -> int:
    """Train at every rate and size, print the losses and the best rates; return the status."""
    rates = rates_of(given.rates, given.factor)
    with errors.installed():
        from tools.checker.transfer import Grid, at_edge, best, drift

    grid, by = Grid(ladder, rates, given.runs_of, given.seeds), "blocks" if by_depth else "width"
    say(f"loss after {given.runs_of} steps, mean of {given.seeds} seeds; * the best rate")
    say(" " * 12 + " ".join(f"{rate:>9.3g}" for rate in rates) + "   best, and as good within 1 %")
    rows = []
    for size in sizes:
        losses = grid.losses(*ladder.shape(size, by_depth))
        rows.append(losses)
        found = best(losses)
        marks = ["*" if place == found.place else " " for place in range(len(rates))]
        numbers = " ".join(f"{loss:8.4f}{mark}" for loss, mark in zip(losses, marks, strict=True))
        flat = f"{rates[found.place]:.3g}, {rates[found.low]:.3g} to {rates[found.high]:.3g}"
        say(f"{by:7s}{size:>4d} {numbers}  {flat}")
    if given.picture:
        _draw_losses(rows, rates, sizes, by, given.picture)
    moved = drift(rows)
    steps = f"{abs(moved)} place{'s' * (abs(moved) != 1)} of the grid"
    if at_edge(rows):
        say(f"not known: a best rate is at the edge of {given.rates}; it moves by at least {steps}")
        return 1
    if abs(moved) <= 1:
        say(f"right: the best rate moves by {steps} from {sizes[0]} to {sizes[-1]}")
        return 0
    way = "falls" if moved < 0 else "rises"
    say(f"WRONG: the best rate {way} by {steps}, a factor {given.factor ** abs(moved):g}")
    return 1


def _draw_losses(
    rows: Sequence[Sequence[float]], rates: Sequence[float], sizes: list[int], by: str, path: str
) -> None:
    """Draw the losses over the rates, a line for each size."""
    plt = _matplotlib()
    figure, ax = plt.subplots(figsize=(6, 4))
    for losses, size in zip(rows, sizes, strict=True):
        ax.plot(rates, losses, marker="o", label=f"{by} {size}")
    ax.set(xscale="log", xlabel="learning rate", ylabel="loss")
    lowest = min(min(losses) for losses in rows)
    ax.set_ylim(lowest * 0.95, min(lowest * 2, ax.get_ylim()[1]))
    ax.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _matplotlib() -> Any:
    """Return matplotlib's pyplot without a display; UserError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise PackageError(errors.PLOTS) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
