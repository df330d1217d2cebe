"""What watches the steps of a run, by the options that ask for it.

    before, after = step_observers(log, exchange, stages, optimizer, mesh, finish_sending)
    for observe in before:
        observe(step)                 and likewise `after`, when the step is done

A module that no option asks for is not loaded.
"""

from collections.abc import Callable

from torch import nn

from distributed.mesh import Mesh
from distributed.store import StoreExchange
from telemetry.log import Log
from telemetry.step_times import StepTimes
from zero import Optimizer

StepObserver = Callable[[int], None]  # it takes the number of the step


def step_observers(
    log: Log,
    exchange: StoreExchange,
    stages: nn.ModuleList,
    optimizer: Optimizer,
    mesh: Mesh,
    finish_sending: Callable[[], None],
) -> tuple[list[StepObserver], list[StepObserver]]:
    """The functions to call before each step, and those to call after it, on every rank.

    exchange: between all ranks, through the store. stages: this rank's. finish_sending: waits for
    the messages that this rank still sends.
    """
    run = log.config.run
    before: list[StepObserver] = []
    after: list[StepObserver] = []
    if run.stats_every:
        from telemetry.layer_stats import LayerStats

        layers = LayerStats(log.config, stages, optimizer, mesh)
        before.append(layers.begin)
        after.append(lambda step: log.take_layers(layers.finish()))
    if run.profile_step or run.torch_profile:
        from telemetry.step_trace import StepTrace

        trace = StepTrace(exchange, log, finish_sending)
        before.append(trace.before)
        after.append(trace.after)
    after.append(StepTimes(exchange, log).after)
    return before, after
