"""Checks of collectives, layers and replicas on real ranks: `mpirun -n 4 python THIS`.

Rank 0 prints `ok` and the number of checks; a wrong result is a RuntimeError.
"""

from pathlib import Path

import torch

from config.run_options import Run
from config.schema import Layout
from distributed.collectives import MAX, Group
from distributed.context import start
from distributed.launch import discover
from distributed.mesh import Mesh

CHECKS = []


def check(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"wrong: {what}")
    CHECKS.append(what)


def everyone(group: Group, make) -> list[torch.Tensor]:
    """Return the tensors that all members make, computed here without communication."""
    return [make(rank) for rank in range(group.size)]


def check_collectives(group: Group, dtype: torch.dtype, elements: int) -> None:
    def make(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(-8, 8, (group.size * elements, 2), generator=generator).to(dtype)

    own, total = make(group.rank), sum(everyone(group, make))
    summed = own.clone()
    group.all_reduce(summed).wait()
    check(torch.equal(summed, total), f"sum {dtype} {elements}")
    largest = own.clone()
    group.all_reduce(largest, MAX).wait()
    check(torch.equal(largest, torch.stack(everyone(group, make)).amax(0)), f"max {dtype}")
    part = torch.empty_like(group.shard(own))
    group.reduce_scatter(part, own.clone()).wait()
    check(torch.equal(part, group.shard(total)), f"reduce-scatter {dtype} {elements}")
    whole = own.clone()
    group.reduce_scatter(group.shard(whole), whole).wait()
    check(torch.equal(group.shard(whole), group.shard(total)), f"in place {dtype} {elements}")
    joined = own.new_zeros(group.size * own.shape[0], 2)
    group.all_gather(joined, own).wait()
    check(torch.equal(joined, torch.cat(everyone(group, make))), f"all-gather {dtype} {elements}")
    group.shard(joined).copy_(own + 1)
    group.all_gather(joined, group.shard(joined)).wait()
    check(torch.equal(joined, torch.cat(everyone(group, make)) + 1), f"gather in place {dtype}")


def check_memory(group: Group, elements: int = 2**22) -> None:
    """Beside its tensors a gather takes nothing, and a sum for two ranks what this one receives:
    gloo's own gather is put together in a copy of the whole, and kept there.
    """

    def beside(run) -> float:
        """The most bytes of a run above what there was before, over those of `whole`."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status("VmRSS")
        run().wait()
        return (status("VmHWM") - before) / whole.nbytes

    whole = torch.ones(group.size * elements)
    check(beside(lambda: group.all_gather(whole, group.shard(whole))) < 0.4, "gather in place")
    if group.size == 2:
        sum_ = beside(lambda: group.reduce_scatter(group.shard(whole), whole))
        check(sum_ < 0.8, f"half of what is summed: {sum_}")


def status(name: str) -> int:
    """Bytes of this process that /proc gives under a name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def check_all_to_all(group: Group, dtype: torch.dtype, elements: int) -> None:
    """Block j of the output is this rank's block of member j's source: a permutation of blocks."""

    def make(rank: int) -> torch.Tensor:
        """(size * elements, 2), every number of the world once."""
        numbers = torch.arange(group.size * elements * 2).view(-1, 2)
        return (numbers + rank * numbers.numel()).to(dtype)

    expected = torch.cat([group.shard(source) for source in everyone(group, make)])
    source, output = make(group.rank), torch.full_like(expected, -1)
    group.all_to_all(output, source).wait()
    check(torch.equal(output, expected), f"all-to-all {dtype} {elements}")
    check(torch.equal(source, make(group.rank)), f"all-to-all keeps its source {dtype} {elements}")
    back = torch.full_like(source, -1)
    group.all_to_all(back, output).wait()
    check(torch.equal(back, source), f"all-to-all twice {dtype} {elements}")


def check_group_of_one() -> None:
    """It copies, and communicates nothing."""
    source, output = torch.arange(6.0).view(3, 2), torch.empty(3, 2)
    Group().all_to_all(output, source).wait()
    check(torch.equal(output, source), "all-to-all of one")


def check_records(group: Group, context) -> None:
    """An all-to-all is recorded once, with its bytes, and is done after the wait."""
    source = torch.zeros(group.size, 5)
    before = group.group_log.entered
    handle = group.all_to_all(torch.empty_like(source), source)
    check(group.group_log.entered == before + 1, "one record")
    handle.wait()
    last = [record for record in context.recorder.ring if hasattr(record, "kind")][-1]
    check((last.kind, last.bytes) == ("all_to_all", source.nbytes), "kind and bytes")
    check(last.ended is not None, "the record has ended")


def main() -> None:
    context = start(discover(), Run())
    with context.failing_loudly():
        group = Mesh(Layout(tp=context.size, dp=1).axes, context).tp
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
            for elements in (1, 1000):
                check_collectives(group, dtype, elements)
                check_all_to_all(group, dtype, elements)
        check_collectives(group, torch.float32, 400_000)  # beyond EXCHANGE_BYTES
        check_all_to_all(group, torch.float32, 400_000)
        check_group_of_one()
        check_records(group, context)
        check_memory(group)
        if context.rank == 0:
            print("ok", len(CHECKS))
    context.stop()


if __name__ == "__main__":
    main()
