r"""Trine beside torch's own parallel parts, and beside tensor parallelism written by hand.

    python benchmarks/peers/peers.py > benchmarks/results/peers.md      all rows, one by one
    python benchmarks/peers/peers.py --rows tp2 pp2-auto --rounds 8

A row is one comparison: Trine with some options, and peers that train the same model, from the same
weights, on the same tokens, with the same optimizer (AdamW, clipping by the global norm). It begins
with a few steps in which every side's losses and gradient norms must be Trine's to fp32 rounding;
anything else is an error. Then the sides take turns, a block of steps each, in alternating order.
All are alive at once, each in its own processes, so that each has its own peak of memory; a side
that is not at work waits for a line on its standard input.

    python benchmarks/peers/peers.py --account --rows one       where the time of a step is

    ratio    interquartile mean of the rounds' ratios, and the middle 95 % over resampled rounds
    memory   peak resident MiB of each rank in the timed steps
    load     the machine's load average at the end of the row

Sides: peer_trine.py; peer_torch.py, peer_by_hand.py, peer_experts.py, peer_transformers.py. Their
processes: peer_sides.py.
"""

import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the project's own modules

from base.cli import Parser
from base.errors import UserError, exit_with
from benchmarks.peers.peer_sides import Block, Side, SideError, check_equal
from benchmarks.peers.peer_worker import KERNELS, Shape
from benchmarks.ratios import in_turns, ratio
from benchmarks.results_file import head

# Qwen3.5 in small: three blocks with gated delta nets, one with attention; heads as published.
HYBRID = (
    "--norm rmsnorm --activation swiglu --positions rotary --no-bias --kv-heads {kv} "
    "--set mixer=gated_delta_net mixer_blocks=3:1 mixer_key_heads={key} mixer_value_heads={value} "
    "mixer_key_size={size} mixer_value_size={size} attention_gate=true qk_norm=head "
    "norm_plus_one=true rotary_fraction=0.25"
)
SHAPES = {
    "4 x 256": Shape(4, 256, 8, 8192, 256, 2, 4),
    "8 x 512": Shape(8, 512, 8, 32768, 512, 2, 8),
    "8 experts": Shape(4, 256, 8, 8192, 256, 2, 4, experts=8, chosen=2, ffn=512),
    "hybrid": Shape(
        4, 256, 4, 8192, 2048, 1, 2, more=HYBRID.format(kv=1, key=2, value=4, size=128)
    ),
    "tiny": Shape(4, 32, 4, 128, 16, 2, 4),
    "tiny experts": Shape(2, 32, 4, 128, 16, 2, 2, experts=4, chosen=2, ffn=48),
    "tiny hybrid": Shape(4, 32, 4, 128, 80, 2, 2, more=HYBRID.format(kv=2, key=2, value=4, size=8)),
}
STEPS = {"4 x 256": 4, "8 x 512": 1, "8 experts": 2, "hybrid": 1}  # in a block
STEPS |= {"tiny": 2, "tiny experts": 2, "tiny hybrid": 2}

PARTS = {
    "plain": "plain PyTorch loop",
    "dtensor": "DTensor",
    "hand": "by hand: f, g, vocabulary-parallel loss",
    "1f1b": "pipelining, 1F1B",
    "zb": "pipelining, zero-bubble",
    "ddp": "DistributedDataParallel",
    "hf-eager": "transformers' Qwen3-MoE, eager experts",
    "hand-experts": "experts by hand: all-to-all, one sum of the other gradients",
    "hf-grouped": "transformers' Qwen3-MoE, grouped experts",
    "hf": "transformers, the chunked form in torch",
    "zero1": "DistributedDataParallel, ZeroRedundancyOptimizer",
}


@dataclass(frozen=True)
class Row:
    """One comparison. options: of train.py beside tp and pp. peers: a kind of PARTS, for a
    pipeline with the blocks of every stage; or options of train.py, for Trine itself; or ONE_RANK.
    """

    name: str
    shape: str
    tp: int
    pp: int
    dp: int
    options: str
    peers: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """How many there are of each side."""
        return self.tp * self.pp * self.dp


ONE_RANK = "one rank"  # a peer: Trine itself on one rank, with the same global batch
AUTO = "--schedule auto"
OWN = tuple(f"--schedule {name}" for name in ("1f1b", "interleaved", "zb-h1", "zb-v"))
ROWS = (
    Row("one", "4 x 256", 1, 1, 1, "", ("plain",)),
    Row("tp2", "4 x 256", 2, 1, 1, "", ("dtensor", "hand")),
    Row("pp2-auto", "4 x 256", 1, 2, 1, AUTO, (*OWN, "1f1b 2,2", "1f1b 3,1", "zb 3,1")),
    Row("dp2", "4 x 256", 1, 1, 2, "--zero 0", ("ddp",)),
    Row("dp2-zero1", "4 x 256", 1, 1, 2, "--zero 1", ("zero1",)),
    Row("tp2-pp2", "4 x 256", 2, 2, 1, "", ("1f1b 2,2", "1f1b 3,1")),
    Row("experts", "8 experts", 1, 1, 1, "", ("hf-eager", "hf-grouped")),
    Row("experts-ep2", "8 experts", 1, 1, 2, "--ep 2", ("hand-experts", "one rank")),
    Row("hybrid", "hybrid", 1, 1, 1, "", ("hf",)),
    Row("tp2-large", "8 x 512", 2, 1, 1, "", ("dtensor", "hand")),
)


# ---- One comparison ------------------------------------------------------------------------------


@contextmanager
def sides_of(row: Row) -> Iterator[list[Side]]:
    """Trine and its peers, with equal weights, ready for commands and on the same cores; they end
    with the block. Each starts alone: some time their passes before the first step.
    """
    sides: list[Side] = []
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        write_weights(row, folder / "weights")
        try:
            for i, peer in enumerate(("", *row.peers)):
                label, words = program(row, peer, folder, i)
                ranks = 1 if peer == ONE_RANK else row.ranks
                sides.append(Side(label, words, ranks, folder / str(i)))
                sides[-1].wait_until_ready()
            for side in sides[1:]:
                side.bind(sides[0].cores())
            yield sides
        finally:
            for side in sides:
                side.end()


def program(row: Row, peer: str, folder: Path, number: int) -> tuple[str, list[str]]:
    """The label of a side, and its words after `python`; peer "": Trine with the row's options."""
    shape = SHAPES[row.shape]
    if not peer or peer == ONE_RANK or peer.startswith("--"):
        layout = f"--tp {row.tp} --pp {row.pp} {peer or row.options}"
        options = f"{'' if peer == ONE_RANK else layout} --hang-timeout 7200"
        words = [*options.split(), "--out", str(folder / f"out{number}"), *shape.options(row.dp)]
        return f"Trine {peer}".strip(), ["benchmarks/peers/peer_trine.py", *words]
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
    return label, ["benchmarks/peers/peer_torch.py", json.dumps(job)]


def write_weights(row: Row, folder: Path) -> None:
    """The initial weights of every side, as Trine draws them."""
    folder.mkdir()
    words = [
        "benchmarks/peers/peer_trine.py",
        "--write",
        str(folder),
        *SHAPES[row.shape].options(1),
    ]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SideError(f"the weights could not be written:\n{done.stderr}")


def measure(sides: list[Side], steps: int, rounds: int) -> list[list[Block]]:
    """Blocks by side: the sides take turns, `steps` steps each."""
    check_equal(sides)
    for side in sides:
        side.run(0)
    return in_turns([functools.partial(side.run, steps) for side in sides], rounds)


def account(row: Row, rounds: int) -> list[str]:
    """The lines of a row's table of where rank 0's time is, in ms a step; SideError as `compare`.

    Waiting: the thread of the steps was not on a core. Python: it was, and in no operation of
    torch. The seconds of operations are those under torch's profiler, all others those without it.
    """
    steps = STEPS[row.shape]
    with sides_of(row) as sides:
        blocks = measure(sides, steps, rounds)
        profiled = in_turns([functools.partial(side.run, -steps) for side in sides], rounds)
        labels = [side.label for side in sides]
    lines = []
    for label, plain, watched in zip(labels, blocks, profiled, strict=True):
        step, busy = (
            1000 * statistics.median(getattr(block, name) for block in plain) / steps
            for name in ("seconds", "busy")
        )
        kernels = [
            1000 * statistics.median(block.kernels[kind] for block in watched) / steps
            for kind in KERNELS
        ]
        cells = [step, *kernels, busy - sum(kernels), step - busy]
        lines.append(f"| {row.name} | {label} | {' | '.join(f'{x:.1f}' for x in cells)} |")
    return lines


def compare(row: Row, rounds: int) -> list[str]:
    """Measure one row; its lines of the table. SideError if a side fails or does not agree."""
    with sides_of(row) as sides:
        blocks = measure(sides, STEPS[row.shape], rounds)
        labels = [side.label for side in sides]
    shape = SHAPES[row.shape]
    tokens = STEPS[row.shape] * shape.samples(row.dp) * shape.seq
    seconds = [[block.seconds for block in own] for own in blocks]
    rates = [f"{tokens / statistics.median(each):,.0f}" for each in seconds]
    memory = [" + ".join(f"{peak / 2**20:.0f}" for peak in own[-1].peaks) for own in blocks]
    options = f"--tp {row.tp} --pp {row.pp} {row.options}".strip()
    lines = []
    for i, label in enumerate(labels[1:], start=1):
        lines.append(
            f"| {row.name} | `{options}` | {label} | {rates[0]} | {rates[i]} | "
            f"{ratio(seconds[i], seconds[0])} | {memory[0]} | {memory[i]} | "
            f"{os.getloadavg()[0]:.1f} |"
        )
    return lines


# ---- Report --------------------------------------------------------------------------------------


def header(rounds: int, words: list[str], accounts: bool) -> str:
    """Return the results' head: the machine, versions and options on which figures depend."""
    command = " ".join(["python benchmarks/peers/peers.py", *words])
    lines = head("Trine beside torch's own parallel parts", command, "gloo, fp32, 1 thread a rank.")
    for name, shape in SHAPES.items():
        if "tiny" not in name:
            lines.append(f"* `{name}`: {shape}; {STEPS[name]} steps a block")
    if accounts:
        columns = ["row", "side", "step", *KERNELS, "Python", "waiting"]
        return "\n".join(
            [
                *lines,
                "",
                f"{rounds} rounds; medians of rank 0, ms a step.",
                "",
                f"| {' | '.join(columns)} |",
                f"| --- | --- |{' --: |' * (len(columns) - 2)}",
            ]
        )
    lines += [
        "",
        f"{rounds} rounds. Tokens/s: median of the rounds. Ratio: Trine's speed over the peer's, "
        "interquartile mean of the rounds' ratios (middle 95 % over resampled rounds). Memory: "
        "peak resident MiB of each rank in the timed steps. Load: average over a minute, at the "
        "end of the row.",
        "",
        "| row | Trine | peer | Trine, tokens/s | peer, tokens/s | ratio | Trine, MiB | peer, MiB "
        "| load |",
        "| --- | --- | --- | --: | --: | --- | --- | --- | --: |",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure the rows, and print the results file as far as it is, row after row."""
    parser = Parser(description=__doc__.splitlines()[0])
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, help="some rows only")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--shape", choices=SHAPES, help="in place of the rows' own, to try a row")
    parser.add_argument("--account", action="store_true", help="where the time of a step is")
    try:
        given = parser.parse_args()
        if given.rounds < 1:
            raise UserError(f"--rounds must be at least 1, not {given.rounds}")
    except UserError as mistake:
        exit_with(mistake)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end too
    print(header(given.rounds, sys.argv[1:], given.account), flush=True)
    for row in ROWS:
        if row.name not in given.rows:
            continue
        row = replace(row, shape=given.shape or row.shape)
        try:
            lines = (account if given.account else compare)(row, given.rounds)
            print("\n".join(lines), flush=True)
        except SideError as error:
            sys.exit(f"error: row {row.name}: {error}")


if __name__ == "__main__":
    main()
