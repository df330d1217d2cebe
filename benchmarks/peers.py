r"""Trine beside torch's own parallel parts, and beside tensor parallelism written by hand.

    python benchmarks/peers.py > benchmarks/results/peers.md      all rows, one by one
    python benchmarks/peers.py --rows tp2 pp2 --rounds 8 --steps 2
    python benchmarks/peers.py --rows one tp2 tp2-sp pp2-auto pp4-auto pp4-equal dp2 dp2-zero1 \
        dp2-zero3 tp2-pp2 --rounds 8                           the small shapes, some 20 minutes
    python benchmarks/peers.py --rows pp2-auto-large --rounds 3

A row is one comparison: Trine with some options, and peers that train the same model, from the same
weights, on the same tokens, with the same optimizer (AdamW, clipping by the global norm). It begins
with a few steps in which every side's losses and gradient norms must be Trine's to fp32 rounding;
anything else is an error. Then the sides take turns, a block of steps each, in alternating order.
All are alive at once, each in its own processes, so that each has its own peak of memory; a side
that is not at work waits for a line on its standard input, and what it uses meanwhile is measured.

    ratio    interquartile mean of the rounds' ratios, and the middle 95 % over resampled rounds
    memory   peak resident MiB of each rank in the timed steps; in brackets since the process began
    bubble   of Trine's sides, in a table of its own: share of the ranks' time without a pass

Sides: peer_trine.py; peer_torch.py, peer_by_hand.py. Their processes: peer_sides.py.
"""

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the project's own modules

import psutil
import torch
from peer_sides import Side, SideError, check_equal
from peer_worker import Shape
from ratios import ratio

from config.messages import Parser, UserError, exit_with

SHAPES = {
    "4 x 256": Shape(4, 256, 8, 8192, 256, 2, 4),
    "8 x 512": Shape(8, 512, 8, 32768, 512, 2, 8),
    "equal stages": Shape(8, 256, 8, 256, 256, 2, 8),
    "tiny": Shape(4, 32, 4, 128, 16, 2, 4),
}
STEPS = {"4 x 256": 4, "8 x 512": 1, "equal stages": 4, "tiny": 2}  # of a block

PARTS = {
    "plain": "plain PyTorch loop",
    "compiled": "plain PyTorch loop, each block and the loss by torch.compile",
    "dtensor": "DTensor",
    "dtensor-sp": "DTensor, sequence parallel",
    "hand": "by hand: f, g, vocabulary-parallel loss",
    "1f1b": "pipelining, 1F1B",
    "interleaved": "pipelining, interleaved 1F1B",
    "zb": "pipelining, zero-bubble",
    "zbv": "pipelining, zero-bubble V",
    "ddp": "DistributedDataParallel",
    "zero1": "DistributedDataParallel, ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "fsdp2-once": "FSDP2, gradients reduced once a step",
}


@dataclass(frozen=True)
class Row:
    """One comparison. options: of train.py beside tp and pp. peers: a kind of PARTS, for a
    pipeline with the blocks of every stage; or options of train.py, for Trine itself.
    """

    name: str
    shape: str
    tp: int
    pp: int
    dp: int
    options: str
    peers: tuple[str, ...]
    micro_batches: int = 0  # of a replica; 0: the shape's

    @property
    def ranks(self) -> int:
        """How many there are of each side."""
        return self.tp * self.pp * self.dp

    def of_shape(self) -> Shape:
        """The shape with this row's number of micro-batches."""
        shape = SHAPES[self.shape]
        return replace(shape, micro_batches=self.micro_batches or shape.micro_batches)


AUTO = "--schedule auto --schedule-costs measured"
OWN = tuple(f"--schedule {name}" for name in ("1f1b", "interleaved", "zb-h1", "zb-v"))
PP2 = ("1f1b 2,2", "1f1b 3,1", "interleaved 1,1,2,0", "zb 3,1", "zbv 1,1,2,0")
PP4 = ("1f1b 1,1,1,1", "1f1b 2,1,1,0", "zb 2,1,1,0", "zbv 0,1,1,1,1,0,0,0")
ROWS = (
    Row("one", "4 x 256", 1, 1, 1, "", ("plain",)),
    Row("one-compile", "4 x 256", 1, 1, 1, "--compile", ("compiled", "--no-compile", "plain")),
    Row("tp2", "4 x 256", 2, 1, 1, "", ("dtensor", "hand")),
    Row("tp2-sp", "4 x 256", 2, 1, 1, "--sequence-parallel", ("dtensor-sp", "hand")),
    Row("pp2", "4 x 256", 1, 2, 1, "", PP2),
    Row("pp4", "4 x 256", 1, 4, 1, "", PP4, micro_batches=8),
    Row("pp4-gpipe", "4 x 256", 1, 4, 1, "--schedule gpipe", ("--schedule 1f1b",), 8),
    Row("pp2-auto", "4 x 256", 1, 2, 1, AUTO, (*OWN, *PP2[:2], *PP2[3:])),
    # Two stages on each of 4 ranks would be more than there are parts: 4 blocks and two ends.
    Row("pp4-auto", "4 x 256", 1, 4, 1, AUTO, (OWN[0], OWN[2], *PP4), 8),
    Row("pp4-equal", "equal stages", 1, 4, 1, AUTO, OWN),
    Row("dp2", "4 x 256", 1, 1, 2, "--zero 0", ("ddp",)),
    Row("dp2-zero1", "4 x 256", 1, 1, 2, "--zero 1", ("zero1",)),
    Row("dp2-zero3", "4 x 256", 1, 1, 2, "--zero 3", ("fsdp2", "fsdp2-once")),
    Row("tp2-pp2", "4 x 256", 2, 2, 1, "", ("1f1b 2,2", "1f1b 3,1")),
    Row("one-large", "8 x 512", 1, 1, 1, "", ("plain",)),
    Row("tp2-large", "8 x 512", 2, 1, 1, "", ("dtensor", "hand")),
    Row("pp2-large", "8 x 512", 1, 2, 1, "", ("1f1b 4,4", "1f1b 7,1", "zb 7,1")),
    Row("pp2-auto-large", "8 x 512", 1, 2, 1, AUTO, ("--schedule 1f1b", "1f1b 7,1", "zb 7,1")),
    Row("dp2-zero1-large", "8 x 512", 1, 1, 2, "--zero 1", ("zero1",)),
    Row("tp2-pp2-large", "8 x 512", 2, 2, 1, "", ("1f1b 4,4", "1f1b 7,1")),
)


# ---- One comparison ------------------------------------------------------------------------------


@dataclass
class Measured:
    """What a row has shown. seconds: a step's, by side and round; memory: by side, of each rank,
    in the timed steps and in all. others: cores that other processes used. waiting: what a side
    used while others were at work, in cores over the whole time, of the side that used most.
    bubbles: by side, of each step; empty where passes are not known.
    """

    labels: list[str]
    seconds: list[list[float]]
    memory: list[list[tuple[int, int]]]
    others: float
    waiting: float
    bubbles: list[list[float]]


@contextmanager
def sides_of(row: Row, folder: Path) -> Iterator[list[Side]]:
    """Trine and its peers, ready for commands and on the same cores; they end with the block. Each
    starts alone: some time their passes before the first step.
    """
    sides: list[Side] = []
    try:
        for i, peer in enumerate(("", *row.peers)):
            label, words = program(row, peer, folder, i)
            sides.append(Side(label, words, row.ranks, folder / str(i)))
            sides[-1].wait_until_ready()
        for side in sides[1:]:
            side.bind(sides[0].cores())
        yield sides
    finally:
        for side in sides:
            side.end()


def program(row: Row, peer: str, folder: Path, number: int) -> tuple[str, list[str]]:
    """The label of a side, and its words after `python`; peer "": Trine with the row's options."""
    shape = row.of_shape()
    if not peer or peer.startswith("--"):
        options = f"--tp {row.tp} --pp {row.pp} {peer or row.options} --hang-timeout 7200"
        words = [*options.split(), "--out", str(folder / f"out{number}"), *shape.options(row.dp)]
        return f"Trine {peer}".strip(), ["benchmarks/peer_trine.py", *words]
    kind, _, blocks = peer.partition(" ")
    job = {
        "kind": kind,
        "shape": asdict(shape),
        "tp": row.tp,
        "dp": row.dp,
        "blocks": [int(count) for count in blocks.split(",") if blocks],
        "weights": str(folder / "weights"),
        "meeting": str(folder / f"meeting{number}"),
    }
    label = PARTS[kind]
    if blocks:
        inside = "DTensor in " if row.tp > 1 else ""
        label = f"{inside}{label}, blocks {blocks.replace(',', ' + ')}"
    return label, ["benchmarks/peer_torch.py", json.dumps(job)]


def write_weights(row: Row, folder: Path) -> None:
    """The initial weights of every side, as Trine draws them."""
    folder.mkdir()
    words = ["benchmarks/peer_trine.py", "--write", str(folder), *row.of_shape().options(1)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SideError(f"the weights could not be written:\n{done.stderr}")


def measure(sides: list[Side], steps: int, rounds: int) -> Measured:
    """Let the sides take turns, `steps` steps each, in an order that turns round and round."""
    check_equal(sides)
    for side in sides:
        side.run(0)
    seconds: list[list[float]] = [[] for _ in sides]
    bubbles: list[list[float]] = [[] for _ in sides]
    at_work = [0.0] * len(sides)
    began, busy, first = time.monotonic(), busy_seconds(), [s.cpu_seconds() for s in sides]
    for number in range(rounds):
        order = list(range(len(sides)))
        shift = number // 2 % len(sides)
        order = order[shift:] + order[:shift]
        for i in order[:: -1 if number % 2 else 1]:
            before = sides[i].cpu_seconds()
            block = sides[i].run(steps)
            seconds[i].append(block.seconds / steps)
            bubbles[i] += block.bubbles
            at_work[i] += sides[i].cpu_seconds() - before
    elapsed = time.monotonic() - began
    total = [s.cpu_seconds() - before for s, before in zip(sides, first)]
    others = (busy_seconds() - busy - sum(total)) / elapsed
    waiting = max(every - own for every, own in zip(total, at_work)) / elapsed
    memory = [list(zip(side.peaks, side.life)) for side in sides]
    labels = [side.label for side in sides]
    return Measured(labels, seconds, memory, others, waiting, bubbles)


def busy_seconds() -> float:
    """Processor time that all processes of the machine have used, and what its host took away."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


# ---- Report --------------------------------------------------------------------------------------


def header(rounds: int, steps: int | None, words: list[str]) -> str:
    """What and where: all that the figures depend on."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in cpus if "model name" in line), "")
    shapes = [
        f"`{name}`: {s.layers} blocks, hidden {s.hidden}, {s.heads} heads, vocabulary {s.vocab:,}, "
        f"sequence {s.seq}, micro-batch {s.micro_batch}, {s.micro_batches} micro-batches a replica "
        f"unless the row says otherwise."
        for name, s in SHAPES.items()
        if name != "tiny"
    ]
    lines = [
        "# Trine beside torch's own parallel parts",
        "",
        "    " + " ".join(["python benchmarks/peers.py", *words]),
        "",
        f"Commit {git.stdout.strip()}, {time.strftime('%Y-%m-%d %H:%M')}; {os.cpu_count()} cores, "
        f"{model or platform.machine()}, {psutil.virtual_memory().total / 2**30:.0f} GiB; load "
        f"average before the first row {os.getloadavg()[0]:.1f}. Python "
        f"{platform.python_version()}, torch {torch.__version__}, gloo, fp32, one thread per rank.",
        "",
        *shapes,
        f"{rounds} rounds of blocks of {steps or STEPS['4 x 256']} steps "
        f"(`8 x 512`: {steps or STEPS['8 x 512']}).",
        "",
        "Tokens/s: median of the rounds. Ratio: Trine's speed over the peer's, interquartile mean "
        "of the rounds' ratios (middle 95 % over resampled rounds). Memory: peak resident MiB of "
        "each rank in the timed steps (since the process began). Others: cores that other "
        "processes of the machine used meanwhile. Waiting: the share of a core that a side used "
        "outside of its turns, of the side that used most.",
        "",
        "| row | Trine | peer | Trine, tokens/s | peer, tokens/s | ratio | Trine, MiB | peer, MiB "
        "| others | waiting |",
        "| --- | --- | --- | --: | --: | --- | --- | --- | --: | --: |",
    ]
    return "\n".join(lines)


def lines_of(row: Row, found: Measured) -> Iterator[str]:
    """The row's lines of the table, one for each peer."""
    shape = row.of_shape()
    tokens = shape.samples(row.dp) * shape.seq
    rates = [f"{tokens / statistics.median(each):,.0f}" for each in found.seconds]
    memory = [sizes(each) for each in found.memory]
    options = f"--tp {row.tp} --pp {row.pp} {row.options}".strip()
    load = f"{found.others:.1f} | {found.waiting:.1%}"
    for i in range(1, len(rates)):
        speed = ratio(found.seconds[i], found.seconds[0])
        yield (
            f"| {row.name} | `{options}` | {found.labels[i]} | {rates[0]} | {rates[i]} | {speed} | "
            f"{memory[0]} | {memory[i]} | {load} |"
        )


BUBBLES = """
## Bubble in the executed trace

Share of all ranks' time in which no pass runs or one waits, from the first pass's start to the last
one's end; median of all timed steps (quartiles). Of Trine's sides of pipelines alone.

| row | side | bubble | MiB |
| --- | --- | --- | --- |"""


def bubbles_of(row: Row, found: Measured) -> Iterator[str]:
    """The row's lines of the table of bubbles."""
    for label, steps, memory in zip(found.labels, found.bubbles, found.memory):
        if row.pp > 1 and len(steps) > 1:
            low, middle, high = statistics.quantiles(steps, n=4)
            own = row.options if label == "Trine" else label.removeprefix("Trine ")
            share = f"{middle:.1%} ({low:.1%} to {high:.1%})"
            yield f"| {row.name} | `{own or '--schedule 1f1b'}` | {share} | {sizes(memory)} |"


def sizes(ranks: list[tuple[int, int]]) -> str:
    """Peaks of all ranks in MiB: in the timed steps, in brackets those of the whole process."""
    steps, life = (" + ".join(f"{b / 2**20:.0f}" for b in each) for each in zip(*ranks))
    return f"{steps} ({life})"


def compare(row: Row, rounds: int, steps: int | None) -> Measured:
    """Measure one row; steps: of a block, if not the shape's. SideError if a side fails or does
    not agree.
    """
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    try:
        write_weights(row, folder / "weights")
        with sides_of(row, folder) as sides:
            return measure(sides, steps or STEPS[row.shape], rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def chosen(names: list[str], shape: str | None) -> list[Row]:
    """The rows of these names, or all; on another shape if one is given. UserError if unknown."""
    known = {row.name: row for row in ROWS}
    if unknown := [name for name in names if name not in known]:
        raise UserError(
            f"--rows: there is no {', '.join(unknown)}; the rows are {', '.join(known)}"
        )
    rows = [known[name] for name in names or known]
    return [replace(row, shape=shape, micro_batches=0) if shape else row for row in rows]


def main() -> None:
    """Measure the rows, and print the results file as far as it is, row after row."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=[], metavar="NAME", help="some rows only")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, help="of a block, in place of the shape's own number")
    parser.add_argument("--shape", choices=SHAPES, help="in place of the rows' own, to try a row")
    try:
        given = parser.parse_args()
        if given.rounds < 1:
            raise UserError(f"--rounds must be at least 1, not {given.rounds}")
        if given.steps is not None and given.steps < 1:
            raise UserError(f"--steps must be at least 1, not {given.steps}")
        rows = chosen(given.rows, given.shape)
    except UserError as mistake:
        exit_with(mistake)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end too
    print(header(given.rounds, given.steps, sys.argv[1:]), flush=True)
    bubbles: list[str] = []
    for row in rows:
        try:
            found = compare(row, given.rounds, given.steps)
        except SideError as error:
            sys.exit(f"error: row {row.name}: {error}")
        print("\n".join(lines_of(row, found)), flush=True)
        bubbles += bubbles_of(row, found)
    if bubbles:
        print("\n".join([BUBBLES, *bubbles]))


if __name__ == "__main__":
    main()
