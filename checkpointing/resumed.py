"""Finds the checkpoint that --resume means, and reads what the run was: its options and its past.

    inherited_options({"resume": "auto", "out": "runs/a"})    before torch is imported, on each rank
    chosen = choose(config, exchange, 0, 1, print)            collective: the checkpoint to load
    past = past_of(chosen, config, exchange)                  collective: what was done before

The options are read early, because they decide what is built. Another node may not see a new
checkpoint yet, so the past that counts is the one that rank 0 reads for all ranks. load.py loads
the state. Torch is not needed here.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from base.errors import CheckpointError, UserError
from checkpointing import folders
from checkpointing.file_format import INDEX
from checkpointing.folders import Chosen
from checkpointing.index import Index, check_files
from config.branches import DECAY_SETS, decaying
from config.command_line import build, check_option, make_model
from config.inherited import Inherited, changed_constants, inherited, left_out
from config.past import Branch, Past, from_text, new_run, to_text
from config.phases import from_saved
from config.run_options import Run
from config.schema import GROUPS, Config
from config.timeline import Timeline
from corpora.usage import Usage
from distributed.store import StoreExchange

# Options on which the order of samples depends, beside their number: by group.
OF_THE_ORDER = {"data": ("data", "split", "order"), "training": ("seed",), "model": ("seq_length",)}


def candidates(resume: str, out: str, branch_from: str | None = None) -> list[str]:
    """Return the checkpoints that --resume may mean, the newest first.

    resume, out, branch_from: the options. With --resume auto the result may be empty. With
    --branch-from they are those of `out`, or if it has none, what that option names. Raise
    UserError if there are none in place, but some that were set aside: to begin at step 0 beside
    them would be to lose them; and if a branch would be in the folder of the run that it is from.
    """
    if resume != "auto":
        return folders.find_checkpoints(resume)
    parent = os.path.join(out, folders.CHECKPOINTS)
    if branch_from:
        _check_other_folder(branch_from, parent)
    found = folders.list_checkpoints(parent)
    if not found:
        folders.refuse_set_aside(parent)
    return found or (folders.find_checkpoints(branch_from) if branch_from else found)


def _check_other_folder(branch_from: str, parent: str) -> None:
    """Raise UserError if the checkpoint of --branch-from is one of this run's own.

    parent: the folder of this run's checkpoints.
    """
    theirs, ours = os.path.realpath(branch_from), os.path.realpath(parent)
    if theirs in (ours, os.path.dirname(ours)) or os.path.dirname(theirs) == ours:
        raise CheckpointError(
            f"--branch-from {branch_from} is in the folder of this run, {os.path.dirname(parent)}: "
            "a branch is a run of its own, give another --out"
        )


def _begins(folder: str, out: str) -> bool:
    """Return whether a checkpoint is not in the run's own folder."""
    own = os.path.realpath(os.path.join(out, folders.CHECKPOINTS))
    return os.path.dirname(os.path.realpath(folder)) != own


# ---- Before the ranks meet -----------------------------------------------------------------------


def inherited_options(given: Mapping[str, Any]) -> Inherited:
    """Return what a run takes from the newest readable checkpoint that --resume means.

    given: the options that flags and files give. Only weights, with --load-weights-only, are not
    the past of a run: then only the model is taken, and `left` has what says what a sample was. If
    no checkpoint can be read, nothing is taken: `choose` says why it cannot be loaded. Raise
    UserError if an option in the checkpoint is wrong.
    """
    resume = given.get("resume")
    out = given.get("out", Run.out)
    branch_from = given.get("branch_from")
    if not all(isinstance(path, str) for path in (resume, out, branch_from or "")):
        return Inherited()
    problem = ""
    for folder in candidates(str(resume), str(out), branch_from):
        try:
            saved, model, past = _read(folder)
            break
        except UserError as error:
            problem = problem or str(error)
    else:
        return Inherited(problem=problem)
    if given.get("load_weights_only"):
        return replace(left_out(saved, given, folder), model=model)
    options = inherited(saved, given)
    plan = from_saved(saved.get("plan"), folder)
    if branch_from:
        past = _branch_past(past, folder, branch_from, str(out))
        if "decay_tokens" in given:
            plan, decay = decaying(saved, past, plan, model.seq_length, given)
            options = {k: v for k, v in options.items() if k not in DECAY_SETS} | decay
    try:
        for name, value in options.items():
            check_option(name, tuple(value) if isinstance(value, list) else value)
    except UserError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return Inherited(options, model, past, folder, changed_constants(saved), plan)


def _branch_past(past: Past, folder: str, branch_from: str, out: str) -> Past:
    """Return the past of a run with --branch-from whose checkpoint is `folder`, with its origin.

    Raise UserError if the folder's run began in another way.
    """
    if _begins(folder, out):
        counts = past.step, past.samples, past.tokens, past.skipped
        return replace(past, branch=Branch(folder, past.run, *counts))
    origin = past.branch
    theirs, ours = (
        os.path.realpath(p) for p in (origin.checkpoint if origin else "/", branch_from)
    )
    if origin is None or os.path.commonpath([theirs, ours]) != ours:
        began = f"a branch of {origin.checkpoint}" if origin else "no branch"
        raise CheckpointError(
            f"--branch-from {branch_from}, but {out} has checkpoints of a run that is {began}: "
            "give another --out"
        )
    return past


def _read(folder: str) -> tuple[dict[str, Any], Any, Past]:
    """Return the configuration, the model and the past in a checkpoint, after checking index.h5.

    Raise UserError if the manifest or index.h5 is damaged.
    """
    manifest = folders.read_manifest(folder)
    if problem := folders.find_problem(folder, INDEX, manifest["files"][INDEX]):
        raise CheckpointError(problem)
    with Index(folder) as index:
        saved = configuration(index)
        return saved, make_model(index.attributes("model"), index.path), _past(index)


def configuration(index: Index) -> dict[str, Any]:
    """Return the options in an open checkpoint by group; UserError if they cannot be read.

    Imported weights have no options.
    """
    text = index.attributes("run").get("config")
    try:
        values = json.loads(str(text))
        groups = values if isinstance(values, dict) else {"it": values}
        if not all(isinstance(groups.get(name, {}), dict) for name in ("it", *GROUPS)):
            raise ValueError("it is no JSON object of options")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index.path} has no configuration: {error}") from None
    return values


def _past(index: Index) -> Past:
    """Return the past of a run that resumes an open checkpoint; UserError if it is damaged."""
    progress = index.attributes("progress")
    step = progress.get("iteration", 0)
    samples = progress.get("consumed_samples", 0)
    if any(type(count) is not int or count < 0 for count in (step, samples)):
        raise CheckpointError(
            f"{index.path} is damaged: iteration is {step!a:.40} and consumed_samples "
            f"{samples!a:.40}; both are whole numbers from 0 on"
        )
    skipped = progress.get("skipped_samples", 0)
    tokens = _tokens(index, samples)
    text = index.attributes("data").get("past")
    if text is None:
        ordered = _order_of_older(configuration(index))
        return Past(step, samples, ordered=ordered, tokens=tokens, skipped=skipped)
    try:
        return replace(from_text(str(text), step, samples), tokens=tokens, skipped=skipped)
    except ValueError as error:
        raise CheckpointError(f"{index.path}: {error}") from None


def _tokens(index: Index, samples: int) -> int:
    """Return the tokens of all `samples` samples that a checkpoint's run has read."""
    usage = index.attributes("data").get("usage")
    if usage is None:  # of an old version
        return samples * int(index.attributes("model")["seq_length"])
    try:
        return Usage.from_text(str(usage)).tokens
    except ValueError as error:
        raise CheckpointError(f"{index.path}: {error}") from None


def _order_of_older(saved: dict[str, Any]) -> tuple[int, ...]:
    """Return for how many samples a version before 0.3 has made the order: those of all steps.

    It computed them from the options of its last start alone. saved: the configuration in the
    checkpoint. The result is () for imported weights.
    """
    names = ("steps", "train_samples", "global_batch_size", "rampup_batch_size", "batch_schedule")
    training = saved.get("training") or {}
    options = {name: training[name] for name in names if training.get(name) is not None}
    model = saved.get("model") or {}
    sizes = ("layers", "hidden", "heads", "seq_length")
    shape = {name: model[name] for name in sizes if name in model}
    if not options or not shape:
        return ()
    return (Timeline(build(shape | options)).total_samples,)


# ---- When the ranks have met ---------------------------------------------------------------------


def choose(
    run: Run, exchange: StoreExchange, print_line: Callable[[str], None] = lambda line: None
) -> Chosen:
    """Return the checkpoint to load, after all ranks have checked its files. Collective.

    print_line: prints on rank 0 which newer checkpoints cannot be loaded, and why. Raise UserError,
    on every rank, if there are checkpoints but each of them has a problem.
    """
    rank = exchange.rank
    # All ranks use rank 0's list: another node may not see a new checkpoint yet.
    listed: Any = None
    if rank == 0:
        try:
            listed = {"folders": candidates(str(run.resume), run.out, run.branch_from)}
        except UserError as error:
            listed = {"error": str(error)}
    listed = exchange.agree(listed, lambda values: values[0])
    if "error" in listed:
        raise CheckpointError(listed["error"])
    problems = []
    damaged = list[str]()
    for folder in listed["folders"]:
        problem = _find_problem(folder, exchange)
        if problem is None:
            return Chosen(folder, tuple(damaged))
        if listed["folders"] == [run.resume]:  # the user named this checkpoint
            raise CheckpointError(problem)
        problems.append(problem)
        damaged.append(os.path.basename(folder))
        print_line(f"{os.path.basename(folder)} cannot be loaded: {problem}")
    if problems:
        raise CheckpointError(f"nothing to resume from: {'; '.join(problems)}")
    return Chosen(None)


def _find_problem(folder: str, exchange: StoreExchange) -> str | None:
    """Return why a checkpoint cannot be loaded, or None, the same on all ranks.

    Every rank checks some of the checkpoint's files. Collective.
    """
    problem = None
    try:
        check_files(folder, True, exchange.rank, exchange.size)
    except UserError as error:
        problem = str(error)
    # All ranks get the problem of the first rank that has found one.
    return exchange.agree(problem, lambda problems: next(filter(None, problems), None))


def past_of(
    chosen: Chosen | None, config: Config, exchange: StoreExchange, run: str | None = None
) -> Past:
    """Return what was done before this start, as rank 0 reads it. Collective.

    It is empty, but for the run's name, if there is no checkpoint, or if only its weights are
    loaded. If the data are not those of the earlier starts, neither is the order of samples. run:
    the name of a run that begins at step 0; None: a new name.
    """
    text: Any = None
    folder = None if chosen is None or config.run.load_weights_only else chosen.folder
    if exchange.rank == 0 and folder is not None:
        with Index(folder) as index:
            past = _past(index)
            ordered = past.ordered if has_order_of(configuration(index), config) else ()
        name = past.run or new_run()
        if config.run.branch_from:
            past = _branch_past(past, folder, config.run.branch_from, config.run.out)
            if _begins(folder, config.run.out):  # a branch is a run of its own
                name = run or new_run()
        words = to_text(past.starts, ordered, name, past.phases, past.branch)
        text = [words, past.step, past.samples, past.tokens, past.skipped]
    elif exchange.rank == 0:
        text = [to_text((), (), run or new_run()), 0, 0]
    return from_text(*exchange.agree(text, lambda values: values[0]))


def has_order_of(saved: dict[str, Any], config: Config) -> bool:
    """Return whether a run reads the data of its checkpoint, in an order of the same kind."""
    ours = json.loads(json.dumps(config.as_dict()))  # with lists in place of tuples
    return all(
        saved.get(group, {}).get(name, ours[group][name]) == ours[group][name]
        for group, names in OF_THE_ORDER.items()
        for name in names
    )
