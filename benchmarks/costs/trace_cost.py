"""The processor time of a step with --trace-numerics over that of the step before it.

    python benchmarks/costs/trace_cost.py [--shapes small wide long] [--pairs 3]

One rank and one thread train a model in fp32. After a step without a trace and the first traced
step, in which the response to rounding is measured, steps with and without a trace take turns.
Times are the process's, user and system together, so that other programs change them little. A
pair's ratio includes the file that is written.
"""

import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]  # the project's own modules

import torch

import data
import trainer
from base.cli import Parser
from base.errors import UserError, exit_with
from benchmarks.results_file import machine
from checkpointing.state import Progress
from config import validation
from config.command_line import build
from telemetry.numerics_trace import NumericsTrace
from telemetry.observer import Step

RESULTS = ROOT / "benchmarks" / "results" / "trace_cost.md"
SHAPES = {
    "small": {"layers": 4, "hidden": 256, "heads": 8, "seq_length": 256, "global_batch_size": 8},
    "wide": {"layers": 2, "hidden": 1024, "heads": 16, "seq_length": 512, "global_batch_size": 8},
    "long": {"layers": 2, "hidden": 1024, "heads": 16, "seq_length": 512, "global_batch_size": 32},
}


def seconds(shape: dict[str, int], pairs: int) -> list[float]:
    """Return the processor seconds of 2 + 2 x pairs steps; each second one is traced."""
    steps = 2 + 2 * pairs
    times = []
    with tempfile.TemporaryDirectory() as out:
        options = {"vocab_size": 8192, "steps": steps, "precision": "fp32", "device": "cpu"}
        options |= {"trace_numerics": list(range(2, steps + 1, 2)), "out": out}
        config = validation.check(build(shape | options), 1)
        state = trainer.build(config)
        samples = data.build(config).train
        trace = NumericsTrace(
            state,
            samples,
            trainer.run_passes,
            lambda value, combine: combine([value]),
            nullcontext,
        )
        for number in range(1, steps + 1):
            state.factory.mesh.recorder.begin_step(number)
            consumed = state.timeline.batches.consumed(number - 1)
            batch = state.timeline.batch_at(consumed)
            is_last = number == steps
            step = Step(number, is_last, consumed, batch, state.length, 1e-4, Progress(number))
            before = time.process_time()
            trace.before_step(step)
            trace.after_step(step, trainer.step(state, samples, consumed, step.lr))
            times.append(time.process_time() - before)
            print(number, times[-1], flush=True)
        state.reader.close()
    return times


def main() -> None:
    """Measure the shapes that are asked for; write the results."""
    parser = Parser("trace_cost.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["# What a traced step costs", "", (__doc__ or "").split("\n\n", 1)[1].strip(), ""]
    lines += [f"{machine()}.", ""]
    lines += ["| layers | hidden | tokens of the step | a step | first traced step | later ones |"]
    lines += ["| --: | --: | --: | --: | --: | --: |"]
    for name in given.shapes:
        shape = SHAPES[name]
        plain, first, *others = seconds(shape, given.pairs)
        ratios = [traced / before for before, traced in zip(others[::2], others[1::2])]
        tokens = shape["global_batch_size"] * shape["seq_length"]
        row = [shape["layers"], shape["hidden"], tokens, f"{statistics.median(others[::2]):.2f} s"]
        spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
        row += [f"{first / plain:.2f} times", f"{statistics.median(ratios):.3f} times {spread}"]
        lines.append(f"| {' | '.join(map(str, row))} |")
    RESULTS.write_text("\n".join([*lines, ""]))
    print(f"written: {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        exit_with(error)
