"""The trace that torch.profiler makes of one step, operators and CUDA kernels: `--torch-profile N`.

    python train.py ... --torch-profile 20     writes OUT/torch_step_20_rank_R.json
    chrome://tracing or ui.perfetto.dev        opens it

The first rank of every pipeline stage writes a file.
"""

import os
from collections.abc import Callable

import torch

from telemetry.log import Log


class TorchProfile:
    """Writes the profile of step --torch-profile; every rank calls the same methods.

    finish_sending: waits for the messages that this rank still sends.
    """

    def __init__(self, log: Log, finish_sending: Callable[[], None]):
        run = log.config.run
        self.log = log
        self.finish_sending = finish_sending
        self.recorder = log.context.recorder
        self.step = run.torch_profile
        name = f"torch_step_{self.step}_rank_{log.context.rank}.json"
        self.path = os.path.join(run.out, name)
        self.profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Start the profiler before its step on the first rank of a stage."""
        at = self.recorder.coordinates
        if step == self.step and at["tp"] == at["dp"] == at.get("cp", 0) == 0:
            self.profiler = torch.profiler.profile()
            self.profiler.start()

    def after(self, step: int) -> None:
        """Stop the profiler, if it runs, and write what it has seen."""
        if self.profiler is None:
            return
        # torch ends the record of a message as it is waited for; once the profiler has stopped,
        # that record is freed memory.
        self.finish_sending()
        self.profiler.stop()
        with self.log.without(self.path):
            open(self.path, "w").close()  # export_chrome_trace says not why it cannot
            self.profiler.export_chrome_trace(self.path)
        self.profiler = None
        self.log.note(f"torch.profiler's trace of step {step}: {self.path}")
