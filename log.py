"""What a run tells: start-up lines, the log line, metrics.jsonl, run.json, TensorBoard, summary.

People read the log line; programs read the row. Only rank 0 writes; every rank calls.

    run.json        the whole configuration, where and with what it ran
    metrics.jsonl   one row per step, one more per evaluation (those have `validation_loss`)
"""

import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

import plan
import schedule
from cluster import Cluster
from collectives import MAX
from config import Config
from parallel import Mesh
from zero import StepResult

FORMULA = "megatron-2025"
# The first steps of a run are slower: allocators, kernels and connections warm up.
WARM_UP_STEPS = 2


class Log:
    """The record of one run; opened before the first step, closed after the last."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        mesh: Mesh,
        parts: list[plan.Stage],
        kernels: dict[str, str],
    ):
        """`kernels`: what runs, by what it does, for the start-up lines and run.json."""
        self.config, self.cluster, self.mesh, self.parts = config, cluster, mesh, parts
        self.writes = cluster.rank == 0
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.evaluations: dict[str, float] = {}
        self.skipped = self.nan = 0
        batch, recompute = config.training.global_batch_size, config.layout.recompute
        self.model_flops = plan.model_flops(config.model, batch, FORMULA) / cluster.size
        executed = plan.hardware_flops(config.model, batch, recompute, FORMULA)
        self.hardware_flops = executed / cluster.size
        if not self.writes:
            return
        self._open_files(kernels)
        self.progress = _progress_bar(config.total_steps)
        self._say_start(kernels)

    # -- during the run ---------------------------------------------------------------------

    def step(
        self, iteration: int, consumed: int, lr: float, result: StepResult, seconds: float
    ) -> None:
        """Record one step; `seconds` is its wall time. Collective: the peak memory is gathered."""
        memory = torch.tensor(_peak_memory(self.cluster.device), device=self.cluster.device)
        self.mesh.world.all_reduce(memory, MAX).wait()
        self.seconds.append(seconds)
        self.losses.append(result.loss)
        self.skipped += result.skipped
        self.nan += not math.isfinite(result.loss)
        if not self.writes:
            return
        model, batch = self.config.model, self.config.training.global_batch_size
        row = {
            "iteration": iteration,
            "consumed_samples": consumed,
            "consumed_tokens": consumed * model.seq_length,
            "seconds": seconds,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": lr,
            "global_batch_size": batch,
            "loss_scale": 1.0,
            "skipped": result.skipped,
            "tokens_per_second": batch * model.seq_length / seconds,
            "tflops_model": self.model_flops / seconds / 1e12,
            "tflops_hardware": self.hardware_flops / seconds / 1e12,
            "peak_memory_bytes": memory.item(),
        }
        self._write(row)
        every, total = self.config.run.log_every, self.config.total_steps
        if iteration % every == 0 or iteration in (1, total):
            self._print(self._line(row))
        if self.progress:
            self.progress.update(self.task, completed=iteration)

    def evaluation(self, split: str, iteration: int, consumed: int, loss: float) -> None:
        """Record an evaluation's mean loss per token on the `validation` or `test` split."""
        self.evaluations[split] = loss
        if not self.writes:
            return
        self._write({"iteration": iteration, "consumed_samples": consumed, f"{split}_loss": loss})
        self._print(
            f" {split} loss at iteration {iteration} | lm loss: {loss:.6E} | "
            f"lm loss PPL: {math.exp(min(loss, 100.0)):.6E} |"
        )

    def note(self, line: str) -> None:
        """Say a line that is no row of metrics."""
        if self.writes:
            self._print(line)

    def close(self) -> None:
        """Print the summary and close the files."""
        if not self.writes:
            return
        if self.progress:
            self.progress.stop()
        if self.losses:  # none if the run it resumed had done all steps
            print(self._summary(), flush=True)
        self.metrics.close()
        if self.board:
            self.board.close()

    def _line(self, row: dict[str, Any]) -> str:
        recent = self.seconds[-self.config.run.log_every :]
        losses = self.losses[-self.config.run.log_every :]
        seconds = sum(recent) / len(recent)
        share = row["seconds"] / seconds  # of the interval's rate over this step's
        return (
            f" iteration {row['iteration']:8d}/{self.config.total_steps:8d} |"
            f" consumed samples: {row['consumed_samples']:12d} |"
            f" consumed tokens: {row['consumed_tokens']:12d} |"
            f" elapsed time per iteration (s): {seconds:.3f} |"
            f" learning rate: {row['learning_rate']:.3E} |"
            f" global batch size: {row['global_batch_size']:5d} |"
            f" lm loss: {sum(losses) / len(losses):.6E} |"
            f" loss scale: {row['loss_scale']:.1f} |"
            f" grad norm: {row['grad_norm']:.3f} |"
            f" number of skipped iterations: {self.skipped:3d} |"
            f" number of nan iterations: {self.nan:3d} |"
            f" samples per second: {row['global_batch_size'] / seconds:.3f} |"
            f" tokens per second: {row['tokens_per_second'] * share:.0f} |"
            f" model TFLOPs: {row['tflops_model'] * share:.3f} |"
            f" hardware TFLOPs: {row['tflops_hardware'] * share:.3f} |"
        )

    def _write(self, row: dict[str, Any]) -> None:
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        if self.board:
            for key, value in row.items():
                self.board.add_scalar(key, value, row["iteration"])

    def _print(self, line: str) -> None:
        if self.progress:
            self.progress.console.print(line, soft_wrap=True, highlight=False, markup=False)
        else:
            print(line, flush=True)

    # -- start and end ----------------------------------------------------------------------

    def _open_files(self, kernels: dict[str, str]) -> None:
        out = self.config.run.out
        os.makedirs(out, exist_ok=True)
        earlier = ("run.json", "metrics.jsonl")
        # A run from step 0 must not mix its checkpoints with another's, nor resume from them later.
        _keep_earlier(out, earlier if self.config.run.resume else (*earlier, "checkpoints"))
        with open(os.path.join(out, "run.json"), "w") as file:
            json.dump(self._facts(kernels), file, indent=1)
        self.metrics = open(os.path.join(out, "metrics.jsonl"), "w")  # noqa: SIM115
        self.board = None
        if self.config.run.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

            self.board = SummaryWriter(os.path.join(out, "tensorboard"))

    def _facts(self, kernels: dict[str, str]) -> dict[str, Any]:
        return {
            "config": self.config.as_dict(),
            "cluster": self.cluster.describe(),
            "kernels": kernels,
            "parameters": plan.parameters(self.config.model),
            "blocks_per_stage": [part.blocks for part in self.parts],
            "flops_formula": FORMULA,
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "commit": _commit(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
        }

    def _say_start(self, kernels: dict[str, str]) -> None:
        if self.progress:
            self.task = self.progress.add_task("training", total=self.config.total_steps)
            self.progress.start()
        self._print(self._layout_line())
        for what, kernel in kernels.items():
            self._print(f"{what}: {kernel}")
        self._print(f"TFLOPs per rank by formula {FORMULA}; hardware TFLOPs add recomputation")
        self._print(plan.stage_table(self.parts, self.config.model))
        layout = self.config.layout
        if layout.pp > 1:
            order = schedule.build(layout.schedule, layout.pp, self.config.micro_batches)
            slots = schedule.simulate(order.stages)
            self._print(f"schedule {layout.schedule}, bubble {schedule.bubble(slots):.1%}:")
            self._print(schedule.draw(slots, columns=24))

    def _layout_line(self) -> str:
        layout, facts = self.config.layout, self.cluster.describe()
        ranks = "1 rank" if facts["ranks"] == 1 else f"{facts['ranks']} ranks"
        return (
            f"{ranks} by {facts['launcher']} on {', '.join(facts['nodes'])}: "
            f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}, zero {layout.zero}, "
            f"micro-batch {layout.micro_batch_size} x {self.config.micro_batches}, "
            f"recompute {layout.recompute}"
            + (", sequence parallel" if layout.sequence_parallel else "")
            + f"; {facts['device']}, {facts['threads_per_rank']} threads a rank, "
            f"collectives: {facts['backend']}, {self.config.training.precision}"
        )

    def _summary(self) -> str:
        timed = self.seconds[WARM_UP_STEPS:] or self.seconds
        median = statistics.median(timed)
        tokens = self.config.training.global_batch_size * self.config.model.seq_length
        out = self.config.run.out
        lines = [
            "",
            self._layout_line(),
            plan.stage_table(self.parts, self.config.model),
            f"tokens per second: {tokens / median:.0f} (median of {len(timed)} steps, "
            f"fastest {tokens / min(timed):.0f}, slowest {tokens / max(timed):.0f})",
            f"loss: first {self.losses[0]:.4f}, last {self.losses[-1]:.4f}"
            + "".join(f", {split} {loss:.4f}" for split, loss in self.evaluations.items()),
            f"files: {out}/run.json, {out}/metrics.jsonl"
            + (f", {out}/tensorboard" if self.board else ""),
        ]
        return "\n".join(lines)


def _progress_bar(total: int):
    """A bar under the log lines if a person watches, else None."""
    if not sys.stdout.isatty():
        return None
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), transient=True)


def _peak_memory(device: torch.device) -> int:
    """Most bytes this rank has held so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _keep_earlier(out: str, names: tuple[str, ...]) -> None:
    """Rename an earlier run's files to NAME.1, NAME.2, ...: a second run loses nothing."""
    if not any(os.path.exists(os.path.join(out, name)) for name in names):
        return
    number = 1
    while any(os.path.exists(os.path.join(out, f"{name}.{number}")) for name in names):
        number += 1
    for name in names:
        path = os.path.join(out, name)
        if os.path.exists(path):
            os.rename(path, f"{path}.{number}")


def _commit() -> str | None:
    """The commit of the code that runs, with + if files differ from it; None outside git."""
    here = os.path.dirname(os.path.abspath(__file__))

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
    except FileNotFoundError:  # no git on this node
        return None
    return commit + ("+" if git("status", "--porcelain", "-uno") else "") or None
