"""What the ranks of `check.py --cluster` do in a part of their own: measure, or compare layouts.

    python -m tools.checker.cluster_worker network FOLDER    writes FOLDER/network.json
    python -m tools.checker.cluster_worker layouts FOLDER    writes a line a layout to layouts.jsonl

cluster.py starts it on every rank of the part, and reads what rank 0 has written.
"""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from base import errors
from base.errors import UserError, sentences

if __name__ == "__main__":
    errors.begin_program()

with errors.installed():
    import torch.distributed as dist

    from config import command_line, validation
    from config.run_options import Run
    from config.schema import Config, Layout
    from distributed.context import Context, start
    from distributed.launch import Launch, discover
    from tools.checker import layouts, shrink
    from tools.checker.bandwidth import columns, line_rate, slow_links
    from tools.checker.compare import Reference
    from tools.checker.engine import Outcome, difference_of
    from tools.checker.report import verdict, what
    from tools.checker.runs import CheckedRun, Worker
    from tools.checker.timed_collectives import Plan, RankGroups, check_sum, measure, pair_scan

LAYOUTS = 12
PAIR_BYTES = {"cuda": 64 * 2**20, "cpu": 2**20}
SIZES = {"cuda": (2**20, 2**24, 2**28), "cpu": (2**16, 2**20, 2**22)}
MOST_NODES = 64  # a scan of all pairs takes a round for each node


# ---- The network ---------------------------------------------------------------------------------


def network(context: Context, folder: Path, options: dict[str, Any]) -> None:
    """Time collectives of all ranks, of those of a node, and across nodes; then pairs of nodes."""
    here = context.local.size
    nodes = list(dict.fromkeys(context.nodes))
    tp = here if len(nodes) > 1 and context.size == here * len(nodes) else 1
    world = RankGroups(context, Layout(tp=tp, pp=1, dp=context.size // tp))
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
    run = dataclasses.replace(small.run, device=device)
    evaluated: Any = {"eval_data": None}  # nodes need not share a folder
    data = dataclasses.replace(small.data, **evaluated)
    return dataclasses.replace(small, run=run, data=data)


def choose(config: Config, ranks: int) -> list[Layout]:
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


def row_of(outcome: Outcome, off: float) -> dict[str, Any]:
    """Return what came of a layout. off: the largest difference of a loss, relative to it."""
    word, more = what(outcome)
    differs = "" if outcome.is_equal else more or word
    return {
        "layout": layouts.name_of(outcome.layout),
        "differs": differs,
        "off": off if math.isfinite(off) else None,
    }


def compare(launch: Launch, folder: Path, options: dict[str, Any]) -> None:
    """Run the small run in each layout, and on rank 0 alone before, which also chooses them.

    The page gets a line a layout; the verdict on all of them, with tensor and operation, is the
    last that rank 0 prints.
    """
    config = small_run(folder, options["device"])
    plain = Run(device=options["device"], watchdog=False)
    expected: list[Any] = [None, None, None]
    if launch.rank == 0:
        alone = dataclasses.replace(config, layout=dataclasses.replace(config.layout, dp=1))
        one = Worker(looks_alone=False)(start(Launch("python"), plain), CheckedRun(alone))
        reference = Reference(one.pieces, one.aliases, config.training.precision)
        chosen = choose(config, launch.size)
        expected = [dataclasses.replace(one, pieces=[]), reference, chosen]
    context = start(launch, plain)
    with context.failing_loudly(), open(folder / "layouts.jsonl", "a") as file:
        dist.broadcast_object_list(expected)
        one, reference, chosen = expected
        outcomes = []
        began = time.monotonic()
        for number, layout in enumerate(chosen, 1):
            job = CheckedRun(dataclasses.replace(config, layout=layout), number=number)
            answers: list[Any] = [None] * context.size
            dist.all_gather_object(answers, Worker({"": reference})(context, job))
            if context.rank:
                continue
            outcome = Outcome(layout, difference_of(reference, one, answers))
            outcomes.append(outcome)
            pairs = zip(answers[0].losses, one.losses, strict=True)
            off = max(abs(a - b) / max(abs(b), 1e-300) for a, b in pairs)
            file.write(json.dumps(row_of(outcome, off)) + "\n")
            file.flush()
        if outcomes:
            print(*verdict(reference, outcomes, 0, time.monotonic() - began), sep="\n", flush=True)
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
