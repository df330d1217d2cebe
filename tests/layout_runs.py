"""Many layouts in few starts of ranks on one device, for the tests marked cuda.

runs = LayoutRuns("cuda", "nccl", folder)
result = runs.results(2, cases)[0]         # losses, norms, weights; or error
expected = runs.reference(cases[0])        # of one rank, in this process
"""

import json
import subprocess
from pathlib import Path

import golden_worker
from ranks import Outcome, start_ranks

from config import run_options, schema, validation
from distributed.context import start as start_context
from distributed.launch import Launch

STARTS = 3  # the most starts of the ranks for one list of cases: all but the first follow a hang


class LayoutRuns:
    """Starts of ranks on one device, and their results, each made once."""

    def __init__(self, device: str, backend: str, folder: Path):
        self.device, self.backend, self.folder = device, backend, folder
        self.done: dict[str, list[dict]] = {}
        self.single: dict[str, dict] = {}

    def start(self, ranks: int, *words: str, timeout: float) -> Outcome:
        """Start ranks on the one GPU; one that is not done in time counts as status 124."""
        environment = {"TRINE_TEST_SHARE_GPU": "1", "CUDA_VISIBLE_DEVICES": "0"}
        try:
            return start_ranks(ranks, *words, timeout=timeout, **environment)
        except subprocess.TimeoutExpired as expired:
            return Outcome(124, "", f"not done in {timeout} s\n{expired.stderr}")

    def results(self, ranks: int, cases: list[dict]) -> list[dict]:
        """The result of each case; {"error": why} of those that failed, hung or never ran.

        A case that hangs or ends the ranks costs a start: the next one begins after it.
        """
        key = json.dumps([ranks, cases])
        if key not in self.done:
            self.done[key] = self._run(ranks, cases)
        return self.done[key]

    def _run(self, ranks: int, cases: list[dict]) -> list[dict]:
        found: list[dict] = []
        for _ in range(STARTS):
            source = self.folder / f"cases-{ranks}-{len(list(self.folder.iterdir()))}.json"
            target = source.with_suffix(".jsonl")
            source.write_text(json.dumps(cases[len(found) :]))
            words = ("tests/nccl_worker.py", str(source), str(target), self.device, self.backend)
            outcome = self.start(ranks, *words, timeout=150)
            lines = target.read_text().splitlines() if target.exists() else []
            found += map(json.loads, lines)
            if len(found) == len(cases):
                return found
            found.append({"error": f"status {outcome.status}\n{outcome.err[-4000:]}"})
            if len(found) == 1:
                break  # the ranks did not start, or no group connects
        missing = len(cases) - len(found)
        return found + [{"error": "not reached: see the first error"}] * missing

    def reference(self, case: dict) -> dict:
        """Return a case's expected result: the run of one rank on this device, in this process."""
        layout = {*schema.Layout.__dataclass_fields__, "nodes", "compile"}
        key = json.dumps({name: value for name, value in case.items() if name not in layout})
        if key not in self.single:
            config = validation.check(golden_worker.options(json.loads(key)), 1)
            run = run_options.Run(device=self.device, watchdog=False)
            self.single[key] = golden_worker.run(config, start_context(Launch("python"), run))
        return self.single[key]
