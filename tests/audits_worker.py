"""Audits with planned wrong products, many in one start of ranks, for tests/test_audit.py and
benchmarks/faults/audit.py.

    mpirun -n 4 python tests/audits_worker.py jobs.json results.json

A job is {"case": options as in golden_worker.py, "steps": number, "faults": {step: fault of
audit_worker.py, or [seed of a drawn fault, chance]}, "audited": whether there are audits}. Each
step is audited; a fault is there in the audit of its step alone, so the weights stay right. The
result has the final weights in sums; for each fault the ranks that the finding names, its text, and
the number of flipped bits; the number of findings in audits without a fault; the number of products
in an audit, by rank; and the seconds in steps and in audits.
"""

import os
import random
import re
import time
from types import SimpleNamespace

import audit_worker
import golden_worker
from observed_steps import observed_step

import data
import trainer
from base.errors import NodeError
from checkpointing.save import Checkpointer
from checkpointing.state import Progress
from config import buffer_sizes, validation
from config.timeline import Timeline
from distributed.context import Context
from distributed.store import StoreExchange
from telemetry.audit import Audit

NO_FAULT = {"product": -1, "rank": -1}


class Audited:
    """A small run whose steps are audited."""

    def __init__(self, case: dict, context: Context, audited: bool = True):
        case = {"steps": 1000} | case | {"audit_every": int(audited)}
        os.makedirs(case["out"], exist_ok=True)
        self.config = validation.check(golden_worker.options(case), context.size)
        self.context = context
        self.samples = data.build(self.config).train
        self.state = trainer.build(self.config, context)
        self.iteration = 0
        self.seconds_of_steps = self.seconds_of_audits = 0.0
        self.audit: Audit | None = None
        if audited:
            optimizer, mesh = self.state.optimizer, self.state.factory.mesh
            about = (self.config, mesh, optimizer, context, self.samples, print, None)
            log = SimpleNamespace(context=context, note=lambda line: None)
            checkpoints = Checkpointer(*about)
            exchange = StoreExchange(context.store, context.rank, context.size, "audits")
            last = Timeline(self.config).total_steps
            self.audit = Audit(self.state, checkpoints, exchange, log, Progress(), last)

    def step(self) -> None:
        """Do one training step."""
        self.iteration += 1
        began = time.perf_counter()
        self.state.factory.mesh.recorder.begin_step(self.iteration)
        consumed = self.state.timeline.batches.consumed(self.iteration - 1)
        batch = self.state.timeline.batch_at(consumed)
        step = observed_step(self.iteration, batch)
        if self.audit:
            self.audit.before_step(step)
        result = trainer.step(self.state, self.samples, consumed, self.config.training.lr)
        self.done = step, result
        self.seconds_of_steps += time.perf_counter() - began

    def audited(self, fault: dict) -> tuple[str, audit_worker.WrongProducts]:
        """Audit the last step with a fault; return the finding, or "", and the fault's mode."""
        here = fault if fault["rank"] == self.context.rank else NO_FAULT
        mode = audit_worker.WrongProducts(here)
        mode.step = self.iteration
        began = time.perf_counter()
        try:
            with mode:
                self.audit.after_step(*self.done)
        except NodeError as error:
            return str(error), mode
        finally:
            self.seconds_of_audits += time.perf_counter() - began
        return "", mode

    def everywhere(self, value) -> list:
        """Every rank's value."""
        return self.audit.exchange.gather("test", value)


def run_job(job: dict, context: Context) -> dict:
    run = Audited(job["case"], context, job.get("audited", True))
    found: dict[str, list] = {}
    false_alarms, products = 0, []
    for number in range(1, job["steps"] + 1):
        run.step()
        if not job.get("audited", True):
            continue
        fault = job.get("faults", {}).get(str(number))
        if isinstance(fault, list):  # a random product of a random rank
            seed, chance = fault
            fault = drawn(random.Random(seed), products) | {"chance": chance, "seed": number}
        finding, mode = run.audited(fault or NO_FAULT)
        if not products:
            products = run.everywhere(mode.count)
        if fault:
            ranks = [int(rank) for rank in re.findall(r"rank (\d+) on", finding)]
            found[str(number)] = [fault, ranks, finding, sum(run.everywhere(mode.flips))]
        else:
            false_alarms += bool(finding)
    run.state.reader.close()
    weights = golden_worker.weights(run.state)
    return {
        "weights": weights,
        "found": found,
        "false_alarms": false_alarms,
        "products": products,
        "seconds": [run.seconds_of_steps, run.seconds_of_audits],
    }


def drawn(source: random.Random, products: list[int]) -> dict:
    """A fault in a random product of a random rank."""
    rank = source.randrange(len(products))
    element, bit = source.randrange(10**6), source.randrange(31)
    return {
        "rank": rank,
        "product": source.randrange(products[rank]),
        "element": element,
        "bit": bit,
    }


if __name__ == "__main__":
    buffer_sizes.LEAST_BUCKET = 1
    golden_worker.run_jobs(run_job)
