"""What the ranks of `check.py --cluster` do in a part of their own: measure, or compare layouts.

    python -m checker.cluster_worker network FOLDER    writes FOLDER/network.json
    python -m checker.cluster_worker layouts FOLDER    writes a line a layout to layouts.jsonl

cluster.py starts it on every rank of the part, and reads what rank 0 has written.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data
import trainer
from checker import layouts, shrink
from checker.bandwidth import columns, line_rate, slow_links
from checker.timed_collectives import Plan, World, check_sum, measure, pair_scan
from config import command_line, validation
from config.errors import UserError, sentences
from config.learning_rate import rate_at
from config.run_options import Run
from config.schema import Config, Layout
from distributed.context import Context, start
from distributed.launch import Launch, discover
from telemetry.pass_times import decide_schedule
from telemetry.replica_check import differing_replicas

LAYOUTS = 12
# fp64 on CPUs and GPUs: rounding is millions of times smaller than what a missing sum changes.
TOLERANCE = 1e-9
PAIR_BYTES = {"cuda": 64 * 2**20, "cpu": 2**20}
SIZES = {"cuda": (2**20, 2**24, 2**28), "cpu": (2**16, 2**20, 2**22)}
MOST_NODES = 64  # a scan of all pairs takes a round for each node


# ---- The network ---------------------------------------------------------------------------------


def network(context: Context, folder: Path, options: dict[str, Any]) -> None:
    """Time collectives of all ranks, of those of a node, and across nodes; then pairs of nodes."""
    here = context.local.size
    nodes = list(dict.fromkeys(context.nodes))
    tp = here if len(nodes) > 1 and context.size == here * len(nodes) else 1
    world = World(context, Layout(tp=tp, pp=1, dp=context.size // tp))
    check_sum(world)
    rate: tuple[float, str] | None = line_rate()
    if options["line_rate"]:
        rate = options["line_rate"] * 1e9, "--line-rate"
    rows = []
    groups = [("world", False)]
    if 1 < tp < context.size:
        groups += [("tp", True), ("dp", True)]
    most = world.free_bytes()
    for (group, together), name in ((g, n) for g in groups for n in ("all-reduce", "p2p")):
        for size in SIZES[context.device.type]:
            row = measure(world, group, together, name, size, Plan(20, 3, options["seconds"]))
            if row is not None and size <= most:
                rows.append(columns(row, rate[0] if rate else None) | {"crosses": row.crosses})
    pairs = {}
    if context.size > 1 and len(nodes) <= MOST_NODES:
        pairs = pair_scan(world, PAIR_BYTES[context.device.type])
    if context.rank:
        return
    about = {
        "rows": rows,
        "line_rate": rate and {"bits_per_second": rate[0], "source": rate[1]},
        "pairs": [[a, b, rate] for (a, b), rate in pairs.items()],
        "slow": slow_links(pairs),
    }
    (folder / "network.json").write_text(json.dumps(about, indent=1))


# ---- Layouts -------------------------------------------------------------------------------------


def small_run(folder: Path, device: str) -> Config:
    """Return the small run whose layouts are compared: a GPT-2 in fp64, of synthetic tokens."""
    config = command_line.parse(["--model", "gpt2-124m", "--steps", "1"])
    config = dataclasses.replace(config, layout=Layout())
    small, _ = shrink.shrink(config, folder)
    return dataclasses.replace(small, run=dataclasses.replace(small.run, device=device))


def chosen(config: Config, ranks: int) -> list[Layout]:
    """Return LAYOUTS layouts of exactly so many ranks, which cover axes and options together.

    Layouts of fewer ranks get more replicas.
    """
    found: dict[str, Layout] = {}
    for layout in layouts.cover(config, ranks):
        times, rest = divmod(ranks, layouts.ranks_of(layout))
        wider = dataclasses.replace(layout, dp=(layout.dp or 1) * times)
        if rest:
            continue
        try:
            validation.check(dataclasses.replace(config, layout=wider), ranks)
        except UserError:
            continue
        found.setdefault(layouts.name_of(wider), wider)
    # From the whole list, which begins with the simplest ones: every n-th.
    names = list(found)
    step = max(1.0, len(names) / LAYOUTS)
    return [found[names[int(i * step)]] for i in range(min(LAYOUTS, len(names)))]


def trained(config: Config, context: Context | None) -> dict[str, Any]:
    """Return the losses and gradient norms of a run, and the replicas that differ; collective."""
    config, _ = decide_schedule(config, context)
    splits = data.build(config)
    state = trainer.build(config, context)
    losses, norms = [], []
    for iteration in range(config.total_steps):
        consumed = config.batches.consumed(iteration)
        batch = config.batches.batch(consumed)
        lr = rate_at(config, consumed, 0, batch)
        result = trainer.step(state, splits.train, consumed, lr)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    mesh = state.factory.mesh
    unequal = [each.sentence for each in differing_replicas(state.stages, state.optimizer, mesh)]
    state.reader.close()
    return {"losses": losses, "norms": norms, "unequal": unequal}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    """Yield what of a layout's run is not as on one rank."""
    for name in ("losses", "norms"):
        for step, (a, b) in enumerate(zip(found[name], expected[name], strict=True), 1):
            if not abs(a - b) <= TOLERANCE * max(abs(b), 1e-300):
                yield f"{name} of step {step}: {a:.12g} for {b:.12g}"
                break
    yield from found["unequal"]


def compare(launch: Launch, folder: Path, options: dict[str, Any]) -> None:
    """Train the small run in each layout, and on rank 0 alone before: it has the expected run."""
    config = small_run(folder, options["device"])
    plain = Run(device=options["device"], watchdog=False)
    expected = {}
    if launch.rank == 0:
        alone = dataclasses.replace(config, layout=dataclasses.replace(config.layout, dp=1))
        expected = trained(validation.check(alone, 1), start(Launch("python"), plain))
    context = start(launch, plain)
    with context.failing_loudly(), open(folder / "layouts.jsonl", "a") as file:
        for layout in chosen(config, context.size):
            of_layout = dataclasses.replace(config, layout=layout)
            found = trained(validation.check(of_layout, context.size), context)
            if context.rank == 0:
                words = next(difference(found, expected), "")
                loss = max(
                    abs(a - b) / max(abs(b), 1e-300)
                    for a, b in zip(found["losses"], expected["losses"])
                )
                row: dict[str, Any] = {"layout": layouts.name_of(layout), "differs": words}
                row["off"] = loss if math.isfinite(loss) else None
                file.write(json.dumps(row) + "\n")
                file.flush()
    context.stop()


def main() -> None:
    """Do the part that the command line names, on this rank."""
    part, folder = sys.argv[1], Path(sys.argv[2])
    options = json.loads((folder / "options.json").read_text())
    launch = discover()
    if part == "layouts":
        compare(launch, folder, options)
        return
    context = start(launch, Run(device=options["device"], watchdog=False))
    with context.failing_loudly():
        network(context, folder, options)
    context.stop()


if __name__ == "__main__":
    with sentences():
        main()
