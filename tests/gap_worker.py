"""train.py with a planted cause of lost time: `python THIS CAUSES ARGUMENTS...`, CAUSES as JSON.

    {"pace": 0.01}                  a stage's forward sleeps so long for each of its blocks
    {"uneven": [0.01, 4]}           the same; in steps without the cause, as if it had 4 blocks
    {"slow": [1, 0.02]}             rank 1 sleeps in every forward of its stages
    {"data": 0.02}                  every micro-batch that is read takes longer
    {"link": ["forward", 0, 0.02]}  what rank 0 of a pipeline sends in that group arrives later

Steps 4, 5, 8, 9, 12, ... have the cause and 6, 7, 10, 11, ... have not, so that one run tells what
it costs on a machine whose speed changes. Sleeps take no processor time.
"""

import json
import sys
import threading
import time
from queue import SimpleQueue

import torch.distributed as dist

import data
import trainer
from config import validation
from config.command_line import parse
from distributed.collectives import Group
from distributed.launch import discover
from distributed.stop_conditions import Signals
from model import Stage


class Planted:
    """The causes of a run. on: whether the current step has them."""

    def __init__(self, causes: dict, rank: int):
        self.causes, self.rank = causes, rank
        self.steps, self.on = 0, False
        step, forward, batches = trainer.step, Stage.forward, data.BatchReader.batches

        def counted(*arguments):
            self.steps += 1
            self.on = self.steps % 4 < 2
            return step(*arguments)

        def slower(stage, *arguments, **keywords):
            time.sleep(self.in_forward(stage))
            return forward(stage, *arguments, **keywords)

        def read_later(*arguments, **more):
            read = batches(*arguments, **more)
            return lambda number: time.sleep(self.on * causes.get("data", 0.0)) or read(number)

        trainer.step, Stage.forward, data.BatchReader.batches = counted, slower, read_later
        if "link" in causes:
            LateLink(self, *causes["link"])

    def in_forward(self, stage: Stage) -> float:
        """Seconds that a stage's forward sleeps."""
        blocks = len(stage.blocks)
        seconds = self.causes.get("pace", 0.0) * blocks
        pace, evenly = self.causes.get("uneven", (0.0, 0))
        seconds += pace * (blocks if self.on else evenly)
        culprit, longer = self.causes.get("slow", (None, 0.0))
        return seconds + self.on * (culprit == self.rank) * longer


class LateLink:
    """Sends a group's messages in order, in steps with the cause each so many seconds later."""

    def __init__(self, planted: Planted, role: str, rank: int, seconds: float):
        self.queue: SimpleQueue = SimpleQueue()
        send_now = Group.send
        threading.Thread(target=self._run, daemon=True).start()

        def send(group, tensor, to):
            log = group.group_log
            if log is None or log.role != role or group.rank != rank:
                return send_now(group, tensor, to)
            record, arrived = log.enter_send(tensor.nbytes, to), threading.Event()
            due = time.monotonic() + planted.on * seconds
            self.queue.put((due, tensor, group, to, arrived))
            return record.under_way(arrived)

        Group.send = send

    def _run(self) -> None:
        while True:
            due, tensor, group, to, arrived = self.queue.get()
            time.sleep(max(0.0, due - time.monotonic()))
            dist.isend(tensor, group.ranks[to], group=group.handle).wait()
            arrived.set()


def main() -> None:
    signals, launch, causes = Signals(), discover(), json.loads(sys.argv[1])
    Planted(causes, launch.rank)
    config = validation.check(parse(sys.argv[2:]), launch.size)
    trainer.main(config, launch, signals)


if __name__ == "__main__":
    main()
