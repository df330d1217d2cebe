"""The planner's command line: one question per command, answered as a table or as JSON.

    python plan.py layouts --model 176b --gpu a100-80 --nodes 48 --global-batch-size 2048
    python plan.py largest --gpu v100-32 --gpus 4
    python plan.py check benchmarks/data/measured_rows.csv

Flags that describe the model, the layout and the training are those of train.py; a layout flag
that is given is held fixed, the others are tried. `--json` prints the same as data.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable

from config import command_line, model_stats, schema, validation
from config.messages import Parser, UserError, exit_with
from config.schema import Config
from planner import hardware, layouts, memory, step_time
from schedules import drawing, partition, simulation
from schedules.schedule import build

BATCH = 2048  # global batch if none is given: every 200B-size run in the seeds
BILLION, GIGA = 1e9, 1e9


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a question found: text for people, data for --json."""

    text: str
    data: object


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question's arguments: the planner's own, train.py's, and which of those were given."""

    own: argparse.Namespace
    config: Config
    given: set[str]
    machine: hardware.Machine

    @property
    def gpus(self) -> int:
        """--gpus, or --nodes full nodes."""
        if self.own.gpus:
            return self.own.gpus
        return (self.own.nodes or 1) * self.machine.node

    @property
    def fixed(self) -> dict:
        """The layout flags that were given."""
        names = {f.name for f in dataclasses.fields(schema.Layout)} - {"dp"}
        return {n: getattr(self.config.layout, n) for n in names & self.given}


def main(arguments: list[str] | None = None) -> None:
    """Answer one question on the command line; a mistake is one sentence and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        answer = ask(arguments)
    except UserError as error:
        exit_with(error)
    as_json = "--json" in arguments
    try:
        print(json.dumps(answer.data, indent=1) if as_json else answer.text)
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        sys.stderr.close()


def ask(arguments: list[str]) -> Answer:
    """The answer to a command line; raises UserError."""
    own, rest = _parser().parse_known_args(arguments)
    if own.question == "check":
        return check(own.file)
    if own.question == "constants":
        return constants()
    if own.calibration and not own.gpu:
        raise UserError("--calibration needs --gpu: which machine was it measured on?")
    machine = hardware.load(own.gpu or "a100-80", own.calibration)
    return QUESTIONS[own.question][0](_asked(own, rest, machine))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="plan.py",
        description="What fits, how fast, and why not the others.",
        epilog="Model, layout and training flags: see `python train.py --help`.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    shared = Parser(add_help=False, allow_abbrev=False)
    shared.add_argument("--json", action="store_true", help="print data, not a table")
    asked = Parser(add_help=False, allow_abbrev=False, parents=[shared])
    asked.add_argument("--gpu", metavar="NAME", help="machine: " + ", ".join(hardware.names()))
    asked.add_argument("--nodes", type=int, help="full nodes (default 1)")
    asked.add_argument("--gpus", type=int, help="GPUs, in place of nodes")
    asked.add_argument("--calibration", metavar="FILE", help="measured rates of this machine, TOML")
    asked.add_argument("--top", type=int, default=20, help="layouts to print (default 20)")
    asked.add_argument("--rejected", action="store_true", help="print every rejected layout")
    asked.add_argument("--tokens", type=float, help="tokens to train on")
    asked.add_argument("--size", type=float, help="parameters wanted")
    asked.add_argument("--trace", metavar="FILE", help="write a Chrome trace")
    for name, (_, text) in QUESTIONS.items():
        commands.add_parser(name, help=text, parents=[asked], allow_abbrev=False)
    text = "rows of a CSV file that cannot be"
    commands.add_parser("check", help=text, parents=[shared]).add_argument("file")
    text = "every fitted constant, its value and what it was fitted on"
    commands.add_parser("constants", help=text, parents=[shared])
    return parser


def _asked(own, rest: list[str], machine) -> Asked:
    given = {a[2:].split("=")[0].replace("-", "_") for a in rest if a.startswith("--")}
    if "model" not in given and not {"layers", "hidden", "heads"} <= given:
        kind = ["--model", "gpt3-175b"] if own.question in ("largest", "shapes") else []
        if own.question in ("rampup", "timeline"):
            kind = ["--model", "bloom-176b"]
        rest = kind + rest
    if "precision" not in given:
        rest = ["--precision", "bf16", *rest]
    if not given & {"global_batch_size", "batch_schedule"}:
        rest = ["--global-batch-size", str(BATCH), *rest]
    for name in ("nodes", "gpus", "top", "tokens", "size"):
        number = getattr(own, name)
        if number is not None and number <= 0:
            raise UserError(f"--{name} must be above 0, not {number:g}")
    return Asked(own, command_line.parse(rest), given, machine)


# ------------------------------------------------------------------------------------------------
# The questions
# ------------------------------------------------------------------------------------------------


def model(asked: Asked) -> Answer:
    """Parameters, FLOPs and bytes of the model."""
    shape, samples = asked.config.model, asked.config.training.global_batch_size
    validation.check_shape(shape)
    total = model_stats.parameters(shape)
    data = {
        "parameters": total,
        "block": model_stats.block_parameters(shape),
        "embedding": model_stats.embedding_parameters(shape),
        "head": model_stats.head_parameters(shape),
        "bytes_18": 18 * total,
        "flops_per_step": {
            name: {
                "model": model_stats.model_flops(shape, samples, name),
                "hardware_full_recompute": model_stats.hardware_flops(shape, samples, "full", name),
            }
            for name in model_stats.FORMULAS
        },
    }
    lines = [f"{total:,} parameters ({total / BILLION:.1f} B)"]
    for name, count in (("block", shape.layers), ("embedding", 1), ("head", 1)):
        lines.append(f"  {name:10} {count:4} x {data[name]:15,}")
    lines.append(f"{18 * total / GIGA:,.0f} GB at 18 bytes per parameter, before activations")
    lines.append(f"FLOPs per step of {samples} samples:    model     hardware, full recomputation")
    for name, flops in data["flops_per_step"].items():
        lines.append(f"  {name:14} {flops['model']:22.4g} {flops['hardware_full_recompute']:13.4g}")
    return Answer("\n".join(lines), data)


def ranked_layouts(asked: Asked) -> Answer:
    """All layouts ranked, all rejected ones with their reason."""
    training, machine = asked.config.training, asked.machine
    ranked, rejected = layouts.rank(asked.config.model, training, machine, asked.gpus, asked.fixed)
    data = {
        "gpus": asked.gpus,
        "machine": machine.name,
        "global_batch_size": training.global_batch_size,
        "ranked": [
            dataclasses.asdict(r.layout) | {"rampup": r.rampup} | r.prediction.as_dict()
            for r in ranked
        ],
        "rejected": [r.layout | {"reason": r.reason} for r in rejected],
    }
    head = (
        f"{len(ranked)} layouts fit on {asked.gpus} GPUs of {machine.name}, "
        f"global batch {training.global_batch_size}, {training.precision}"
    )
    lines = [head, _RANKED_HEAD] + [_ranked_line(r) for r in ranked[: asked.own.top]]
    lines += [f"... and {len(ranked) - asked.own.top} slower ones"] * (len(ranked) > asked.own.top)
    lines += ["", f"{len(rejected)} cannot run:"] + _reasons(rejected, asked.own.rejected)
    lines += _warnings(ranked[0].prediction if ranked else None)
    return Answer("\n".join(lines), data)


_RANKED_HEAD = (
    "   tp   pp    dp  mbs recompute   s/step   tokens/s    MFU  bubble  "
    "GB first/max/last  free GB  ramp-up"
)


def _ranked_line(ranked: layouts.Ranked) -> str:
    at, p = ranked.layout, ranked.prediction
    held = [stage.total / GIGA for stage in p.memory]
    return (
        f"{at.tp:5}{at.pp:5}{at.dp:6}{at.micro_batch_size:5} {at.recompute:9}{p.seconds:9.2f}"
        f"{p.tokens_per_second:11,.0f}{p.mfu:7.1%}{p.bubble:8.1%}"
        f"{held[0]:7.1f}{max(held):6.1f}{held[-1]:6.1f}{p.margin / GIGA:9.1f}  {ranked.rampup}"
    )


def _reasons(rejected: list[layouts.Rejected], every: bool) -> list[str]:
    if every:
        return [
            "  " + " ".join(f"{k}={v}" for k, v in r.layout.items()) + f": {r.reason}"
            for r in rejected
        ]
    kinds: dict[str, list[layouts.Rejected]] = {}
    for r in rejected:
        kinds.setdefault(re.sub(r"[\d.]+", "", r.reason), []).append(r)
    lines = [f"  {len(own):4}  {own[0].reason}" for own in kinds.values()]
    return [*lines, "  (one example of each kind; --rejected shows all)"]


def _warnings(prediction: step_time.Prediction | None) -> list[str]:
    return [f"note: {text}" for text in prediction.warnings] if prediction else []


def balance(asked: Asked) -> Answer:
    """Blocks, parameters, time and memory per stage, and a drawing."""
    run = _placed(asked)
    rows = partition.stage_specs(run.model, run.layout)
    table = memory.stages(run.model, run.layout, run.training, asked.machine)
    fullest = max(table, key=lambda stage: stage.total).stage
    lines = [
        partition.stage_table(rows, run.model),
        "",
        _memory_table(table, fullest, asked.machine),
    ]
    widest = max(row.share for row in rows)
    lines += ["", "share of time"]
    for row in rows:
        bar = "#" * round(50 * row.share / widest)
        lines.append(f"stage {row.index:3} {bar:50} {row.share:.1%}")
    data = {
        "stages": [dataclasses.asdict(row) for row in rows],
        "memory": [dataclasses.asdict(stage) | {"total": stage.total} for stage in table],
        "fullest": fullest,
    }
    return Answer("\n".join(lines), data)


def _memory_table(table: list[memory.StageMemory], fullest: int, machine) -> str:
    names = ("weights", "gradients", "optimizer", "activations", "working", "buffers", "context")
    lines = [
        f"on {machine.name}",
        "GB per GPU" + "".join(f"{name:>12}" for name in (*names, "total", "free")),
    ]
    for stage in table:
        parts = [getattr(stage, name) for name in names]
        parts += [stage.total, machine.memory - stage.total]
        mark = "  <- fullest" * (stage.stage == fullest)
        lines.append(f"stage {stage.stage:<4}" + "".join(f"{p / GIGA:12.1f}" for p in parts) + mark)
    return "\n".join(lines)


def _placed(asked: Asked) -> Config:
    """The configuration with dp filled in for the GPUs asked for, checked."""
    base = asked.config
    layout = base.layout
    gpus = asked.own.gpus or (asked.own.nodes or 0) * asked.machine.node
    gpus = gpus or layout.tp * layout.pp * (layout.dp or 1)
    steps = dataclasses.replace(base.training, steps=base.training.steps or 1, train_samples=None)
    return validation.check(dataclasses.replace(base, training=steps), gpus)


def largest(asked: Asked) -> Answer:
    """The largest model that trains on these GPUs."""
    like, gpus = asked.config.model, asked.gpus
    size, found, layout = layouts.largest(asked.machine, gpus, asked.config.training, like)
    data = {"parameters": size, "gpus": gpus, "machine": asked.machine.name}
    data |= {"model": dataclasses.asdict(found), "layout": dataclasses.asdict(layout)}
    text = (
        f"{size / BILLION:.1f} B parameters on {gpus} x {asked.machine.name}: "
        f"{found.layers} layers, hidden {found.hidden}, {found.heads} heads; "
        f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp}, micro-batch 1, full recomputation"
    )
    return Answer(text, data)


def smallest(asked: Asked) -> Answer:
    """The fewest nodes that hold the model."""
    run, machine = asked.config, asked.machine
    nodes, layout = layouts.smallest(run.model, run.training, machine)
    data = {"nodes": nodes, "gpus": nodes * machine.node, "layout": dataclasses.asdict(layout)}
    text = (
        f"{nodes} nodes of {machine.node} {machine.name}: tp {layout.tp}, pp {layout.pp}, "
        f"dp {layout.dp}, micro-batch 1, full recomputation"
    )
    return Answer(text, data)


def days(asked: Asked) -> Answer:
    """How long so many tokens take, on the fastest layout or the given one."""
    if not asked.own.tokens:
        raise UserError("how many tokens? give --tokens, such as --tokens 450e9")
    ranked, _ = layouts.rank(
        asked.config.model, asked.config.training, asked.machine, asked.gpus, asked.fixed
    )
    if not ranked:
        raise UserError(f"no layout fits on {asked.gpus} GPUs of {asked.machine.name}")
    best = ranked[0]
    seconds = asked.own.tokens / best.prediction.tokens_per_second
    data = {"days": seconds / 86400, "tokens": asked.own.tokens, "gpus": asked.gpus}
    data |= {"layout": dataclasses.asdict(best.layout), "seconds_per_step": best.prediction.seconds}
    lines = [
        f"{seconds / 86400:.1f} days for {asked.own.tokens:.3g} tokens on {asked.gpus} GPUs of "
        f"{asked.machine.name}, without stops and ramp-up",
        _RANKED_HEAD,
        _ranked_line(best),
    ]
    return Answer("\n".join(lines + _warnings(best.prediction)), data)


def shapes(asked: Asked) -> Answer:
    """Layers x hidden x heads near a size that suit tiles, tp and pp."""
    if not asked.own.size:
        raise UserError("how many parameters? give --size, such as --size 200e9")
    run = asked.config
    found = layouts.shapes(asked.own.size, run.model, run.layout, run.training, asked.machine)
    data = [
        dataclasses.asdict(s.model)
        | {"parameters": s.parameters, "efficiency": s.efficiency, "pp": s.stages}
        for s in found
    ]
    lines = [
        f"at tp {run.layout.tp}, micro-batch {run.layout.micro_batch_size}, {asked.machine.name}:",
        "hidden layers heads head size  ratio  billions  of peak   pp with (layers + 2) % pp == 0",
    ]
    for s in found[: asked.own.top]:
        m = s.model
        lines.append(
            f"{m.hidden:6}{m.layers:7}{m.heads:6}{m.head_size:10}{s.ratio:7.0f}"
            f"{s.parameters / BILLION:10.1f}{s.efficiency:9.1%}   {' '.join(map(str, s.stages))}"
        )
    return Answer("\n".join(lines), data)


def rampup(asked: Asked) -> Answer:
    """Every batch of a ramp-up: when, how long, on how many nodes, with which micro-batches."""
    run, node = asked.config, asked.machine.node
    levels = schema.batch_schedule(run.training, run.model.seq_length).levels()
    if len(levels) == 1:
        raise UserError(
            "which ramp-up? give --rampup-batch-size START INCREMENT SAMPLES, such as "
            "192 16 9765625, or --batch-schedule TOKENS:SIZE ..., such as 0:192 5B:1024"
        )
    replica = run.layout.tp * run.layout.pp
    most = -(-(asked.own.gpus or 0) // node) or asked.own.nodes
    most = most or -(-levels[0].batch * replica // node)  # more could not begin
    table = [(level, layouts.allowed(run.layout, level.batch, node, most)) for level in levels]
    everywhere = _for_all([every for _, every in table])
    lines = [
        f"on 1 to {most} nodes of {node} {asked.machine.name}, {replica} GPUs a replica; "
        f"nodes: micro-batch sizes",
        f"every batch runs on {_allowed_text(everywhere) or 'no number of nodes'}",
        " batch  first step    consumed   steps   runs on",
    ]
    for level, every in table:
        steps = "" if level.steps is None else level.steps
        line = f"{level.batch:6}{level.first_step:12,}{level.consumed:12,}{steps:>8}   "
        lines.append(line + (_allowed_text(every) or "no number of nodes"))
    data = {
        "levels": [
            dataclasses.asdict(level) | {"allowed": [dataclasses.asdict(one) for one in every]}
            for level, every in table
        ],
        "every": [dataclasses.asdict(one) for one in everywhere],
    }
    return Answer("\n".join(lines), data)


def _for_all(tables: list[list[layouts.Allowed]]) -> list[layouts.Allowed]:
    """The numbers of nodes and micro-batches that are in every table."""
    common = []
    for one in tables[0]:
        others = [{a.nodes: a.micro_batches for a in every}.get(one.nodes, []) for every in tables]
        sizes = [size for size in one.micro_batches if all(size in other for other in others)]
        if sizes:
            common.append(dataclasses.replace(one, micro_batches=sizes))
    return common


def _allowed_text(every: list[layouts.Allowed]) -> str:
    return "; ".join(f"{one.nodes}: {' '.join(map(str, one.micro_batches))}" for one in every)


def timeline(asked: Asked) -> Answer:
    """The schedule as a picture, and as a Chrome trace of predicted seconds."""
    run = _placed(asked)
    passes = step_time.stage_passes(run.model, run.layout, run.training, asked.machine)
    count = run.micro_batches(run.batches.levels()[-1].batch)
    count = min(count, 4 * run.layout.pp)
    order = build(run.layout.schedule, run.layout.pp, count)
    picture = drawing.draw(simulation.simulate(order))
    slots = simulation.simulate(order, step_time.action_seconds(passes))
    events = [
        drawing.trace_event(str(slot.action), 0, stage, slot.start, slot.end)
        for stage, row in enumerate(slots)
        for slot in row
    ]
    bubble = simulation.bubble(slots)
    lines = [picture, f"bubble {bubble:.1%} with {count} micro-batches"]
    if asked.own.trace:
        _write(asked.own.trace, json.dumps(drawing.trace(events)))
        lines.append(f"written: {asked.own.trace} (open in ui.perfetto.dev or chrome://tracing)")
    return Answer("\n".join(lines), drawing.trace(events) | {"bubble": bubble})


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def check(path: str) -> Answer:
    """Rows of a CSV file that contradict themselves or each other."""
    from planner import published_rows

    found = published_rows.check(published_rows.read(path))
    lines = [f"{f.row_id:10} {f.kind:9} {f.text}" for f in found]
    lines.append(f"{len(found)} findings in {len({f.row_id for f in found})} rows")
    return Answer("\n".join(lines), [dataclasses.asdict(f) for f in found])


def constants() -> Answer:
    """Every fitted constant with its value, meaning and rows."""
    found = hardware.constants()
    lines = []
    for c in found:
        lines += [f"{c.name} = {c.value:g} {c.unit}", f"    {c.meaning}; fitted on {c.fitted_on}"]
    return Answer("\n".join(lines), [dataclasses.asdict(c) for c in found])


QUESTIONS: dict[str, tuple[Callable[[Asked], Answer], str]] = {
    "model": (model, "parameters, FLOPs and bytes of a model"),
    "layouts": (ranked_layouts, "all layouts by seconds per step, and why others cannot run"),
    "stages": (balance, "blocks, parameters, time and memory per stage"),
    "largest": (largest, "the largest model that trains on some GPUs"),
    "smallest": (smallest, "the fewest nodes that hold a model"),
    "days": (days, "how long training takes"),
    "shapes": (shapes, "layers x hidden x heads of a size that suit tiles, tp and pp"),
    "rampup": (rampup, "a batch-size ramp-up, checked before step 1"),
    "timeline": (timeline, "the schedule as a picture and a Chrome trace"),
}


if __name__ == "__main__":
    main()
