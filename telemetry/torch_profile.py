"""The trace that torch.profiler makes of one step, operators and CUDA kernels, by `torch_profile`.

    python train.py ... --set torch_profile=20     writes OUT/torch_step_20_rank_R.json
    chrome://tracing or ui.perfetto.dev            opens it

The first rank of every pipeline stage writes a file. The file of an earlier start is renamed to
NAME.1 (or .2, ...).
"""

import os
from collections.abc import Callable

import torch

from config.run_options import unused_number
from telemetry.log import Log
from telemetry.observer import Observer, Step
from zero import StepResult


class TorchProfile(Observer):
    """Writes the profile of one step, torch_profile; every rank calls the same methods.

    finish_sending: waits for the messages that this rank still sends.
    """

    def __init__(self, log: Log, finish_sending: Callable[[], None]):
        """Read the step to profile from the run's options.

        log: the run's log. finish_sending: waits for the messages that this rank still sends.
        """
        run = log.config.run
        self.log = log
        self.finish_sending = finish_sending
        self.recorder = log.context.recorder
        self.step = run.torch_profile  # the number of the step
        name = f"torch_step_{self.step}_rank_{log.context.rank}.json"
        self.path = os.path.join(run.out, name)
        self.profiler: torch.profiler.profile | None = None

    def before_step(self, step: Step) -> None:
        """Start the profiler if the step is to be profiled and this is a stage's first rank."""
        position = self.recorder.coordinates  # this rank's position on each axis of the mesh
        is_first = position["tp"] == position["dp"] == position.get("cp", 0) == 0
        if step.iteration == self.step and is_first:
            self.profiler = torch.profiler.profile()
            self.profiler.start()

    def after_step(self, step: Step, result: StepResult) -> None:
        """Stop the profiler and write its trace; without effect after a step without profiler."""
        if self.profiler is None:
            return
        # torch writes into a message's record when the message is waited for. The profiler frees
        # the records when it stops, so all messages must be waited for before.
        self.finish_sending()
        self.profiler.stop()
        with self.log.without(self.path):
            if os.path.exists(self.path):  # an earlier start of the run has profiled this step
                os.rename(self.path, f"{self.path}.{unused_number([self.path])}")
            # If the file cannot be written, `open` says why, and export_chrome_trace does not.
            open(self.path, "w").close()
            self.profiler.export_chrome_trace(self.path)
        self.profiler = None
        self.log.note(f"torch.profiler's trace of step {step.iteration}: {self.path}")
