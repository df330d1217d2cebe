"""When a run calls its observers: if this failed, one would miss a step or a stop."""

import trainer
from config import validation
from config.command_line import parse
from distributed.context import Context
from distributed.launch import Launch
from telemetry.observer import Observer, Step

RUN = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 31 --global-batch-size 2"
RUN += " --device cpu --no-watchdog"


class Recorder(Observer):
    """Records each call, and what the step says then."""

    def __init__(self):
        self.calls: list[tuple] = []

    def before_step(self, step: Step) -> None:
        self.calls.append(("before", step.iteration, step.done.iteration, len(step.stats)))

    def after_step(self, step: Step, result) -> None:
        self.calls.append(("after", step.iteration, step.done.iteration, len(step.stats)))

    def after_skip(self, step: Step) -> None:
        self.calls.append(("skip", step.iteration, step.done.iteration, list(step.samples)))

    def between_steps(self, step: Step) -> None:
        self.calls.append(("between", step.iteration, step.is_last, step.stops))

    def at_end(self, done) -> None:
        self.calls.append(("end", done.iteration))

    def at_exit(self) -> None:
        self.calls.append(("exit",))


def observed(monkeypatch, options: str) -> list[tuple]:
    """The calls of a run, which has one more observer than others, behind them."""
    recorder = Recorder()
    make = trainer.Trainer._make_observers
    monkeypatch.setattr(
        trainer.Trainer, "_make_observers", lambda run, tasks: [*make(run, tasks), recorder]
    )
    stop = Context.stop
    # A status other than 0 would end this process.
    monkeypatch.setattr(Context, "stop", lambda context, status: stop(context))
    trainer.main(validation.check(parse(f"{RUN} {options}".split()), 1), Launch("python"))
    return recorder.calls


def test_every_step_is_seen_at_each_point_and_a_batch_left_out_once(tmp_path, monkeypatch):
    options = f"--steps 3 --skip-samples 2:4 --out {tmp_path}"
    assert observed(monkeypatch, options) == [
        ("before", 1, 0, 0),
        ("after", 1, 1, 1),
        ("between", 1, False, False),
        ("skip", 2, 2, [2, 3]),
        ("between", 2, False, False),
        ("before", 3, 2, 0),
        ("after", 3, 3, 1),
        ("between", 3, True, False),
        ("end", 3),
        ("exit",),
    ]


def test_a_run_that_stops_early_has_no_end_and_saves(tmp_path, monkeypatch):
    calls = observed(monkeypatch, f"--steps 3 --stop-at-samples 4 --out {tmp_path}")
    assert calls[-3:] == [("after", 2, 2, 1), ("between", 2, False, True), ("exit",)]
    assert (tmp_path / "checkpoints" / "step_00000002").is_dir()


def test_a_stop_in_the_last_step_changes_nothing(tmp_path, monkeypatch):
    calls = observed(monkeypatch, f"--steps 3 --stop-at-samples 6 --out {tmp_path}")
    assert calls[-3:] == [("between", 3, True, False), ("end", 3), ("exit",)]


def test_the_order_of_a_run_with_all_of_them(tmp_path, monkeypatch):
    """The log has a step before it is judged; the save comes last."""
    made: list[str] = []
    make = trainer.Trainer._make_observers

    def remember(run, tasks):
        observers = make(run, tasks)
        made.extend(type(observer).__name__ for observer in observers)
        return observers

    monkeypatch.setattr(trainer.Trainer, "_make_observers", remember)
    options = f"{RUN} --steps 1 --out {tmp_path} --set torch_profile=1 --trace-numerics 1"
    options += " --check-replicas-every 1 --sample-every 1 --sample-prompt 1"
    trainer.main(validation.check(parse(options.split()), 1), Launch("python"))
    assert made == [
        "TorchProfile",
        "NumericsTrace",
        "StepTimes",
        "StragglerCheck",
        "Log",
        "LossMonitor",
        "Evaluations",
        "RunSamples",
        "ReplicaCheck",
        "Saving",
    ]
