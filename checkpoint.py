"""Shows, verifies, merges, exports and imports checkpoints, which do not depend on a layout.

    python checkpoint.py show DIR                                prints what the checkpoint contains
    python checkpoint.py verify DIR                              compares all checksums
    python checkpoint.py merge A B C OUT --weights 1-sqrt        the mean of their weights
    python checkpoint.py export --to hf DIR OUT [--dtype bf16]   weights for transformers
    python checkpoint.py import --from hf DIR OUT                weights to begin training with

checkpointing/ has the format, and how a run saves and loads.
"""

import argparse
import math
import os
import shlex
import signal
import sys
from typing import Any

# python -P and PYTHONSAFEPATH leave out the folder of the program.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

from base import errors  # imported first, because it refuses a Python that is too old
from distributed.parent_death import signal_at_parents_death

# The signals that end a process in which a library has crashed.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


def continue_in_child() -> None:
    """Fork, and return only in the child; the parent waits and exits with the child's status.

    The child does the command, so that a crash in it becomes an error message: HDF5 crashes on some
    damaged files whose checksums were made to match. Raise UserError in the parent if it crashed.
    """
    child = os.fork()
    if child == 0:
        signal_at_parents_death()
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the child too, which ends then
    _, wait_status = os.waitpid(child, 0)
    status = os.waitstatus_to_exitcode(wait_status)  # negative: the signal that ended the child
    if -status in CRASHES:
        name = signal.Signals(-status).name
        raise errors.UserError(f"{name} in a library that reads these files: they are damaged")
    if status < 0:
        status = 128 - status  # negative: a signal; a shell reports 128 + the signal's number
    sys.exit(status)


if __name__ == "__main__":
    errors.begin_program()
    # The fork comes before the imports below: some of them start threads, which it does not copy.
    with errors.sentences():
        continue_in_child()

with errors.installed():
    from architecture import tensors
    from architecture.families import FAMILIES
    from base.cli import Parser
    from base.errors import CheckpointError, UserError, printable
    from checkpointing import folders, model_record
    from checkpointing.index import GROUPS, Index, check_files
    from config.command_line import make_model
    from config.corpus_record import TEXT
    from config.inherited import sample_options


def _checks(manifest: dict[str, Any]) -> str:
    """Return, as text, the names of the checks that a checkpoint's state has passed.

    manifest: the contents of the checkpoint's manifest, in which a run lists the checks that it did
    before it saved. The text is "not known" if the manifest has no such list.
    """
    checked = manifest.get("checked")
    if isinstance(checked, list) and all(isinstance(name, str) for name in checked):
        return ", ".join(checked) or "none"
    return "not known"


def show(folder: str) -> str:
    """Return a description of a checkpoint's contents, for people to read.

    folder: the folder of the checkpoint. Raise UserError if a file is missing or has another size.
    """
    manifest = check_files(folder, contents=False)
    files = manifest["files"].values()
    gigabytes = sum(file["bytes"] for file in files) / 1e9
    lines = [
        f"{folder}: step {manifest['step']}, complete by size: {len(files)} files, "
        f"{gigabytes:.3f} GB",
        f"checks passed before the save: {_checks(manifest)}",
    ]
    with Index(folder) as index:
        # A line for each group of numbers, such as the model's shape and the run's progress.
        for group in GROUPS:
            values = index.attributes(group)
            lines.append(f"{group}: " + ", ".join(f"{k} {v}" for k, v in values.items()))
        # The tensors: what is saved of each (weights and optimizer state), then names and shapes.
        shapes = index.shapes
        kinds = ", ".join(f"{kind} {index.dtypes[kind]}" for kind in index.kinds)
        total = sum(math.prod(shape) for shape in shapes.values())
        record = model_record.read(folder)
        if record is not None:
            lines += model_record.describe(record)
        lines.append(f"{len(shapes)} tensors of {total:,} elements, each with: {kinds}")
        lines += _undescribed(index)
        lines += [f"  {name:48} {' x '.join(map(str, shape))}" for name, shape in shapes.items()]
    return "\n".join(lines)


def _undescribed(index: Index) -> list[str]:
    """Return a line about tensors that are not those of the checkpoint's options, if any."""
    model = make_model(index.attributes("model"), index.path)
    difference = tensors.compare(index.shapes, model)
    if not difference:
        return []
    return [f"tensors that its options do not describe: {difference.text()}"]


def run_command(arguments: list[str]) -> None:
    """Run a command; raise UserError for wrong options or damaged files."""
    options = _parser().parse_args(arguments)
    # An import reads no checkpoint of this program; the other commands do.
    if options.command == "import":
        from checkpointing.hf_export import import_weights

        import_weights(options.source, options.target, lambda line: print(printable(line)))
        print(f"weights of {options.source} are in {options.target}, their shape in its run.json;")
        resume = f"--resume {shlex.quote(options.target)} --load-weights-only"
        print(f"to begin training with them: {resume}")
        return
    if options.command == "export" and not options.shard_gb > 0:
        raise UserError(f"--shard-gb {options.shard_gb:g}: a file needs more than 0 bytes")
    if options.command == "merge":
        _merge(options.sources, options.target, options.weights, options.ema)
        return
    folder = folders.find_checkpoints(options.source)[0]  # of a run: the newest checkpoint
    if options.command == "show":
        print(printable(show(folder)))
        return
    # Both verify and export compare the checksums of all files.
    manifest = check_files(folder, contents=True)
    print(f"{folder}: all {len(manifest['files'])} files match their checksums")
    if options.command == "verify":
        with Index(folder) as index:
            for line in _undescribed(index):
                print(printable(line))
    if options.command == "export":
        from checkpointing.hf_export import export_weights

        files = export_weights(
            folder,
            options.target,
            options.dtype,
            options.shard_gb * 1e9,
            options.tokenizer,
            options.family,
            options.ema,
        )
        print(printable(f"{options.target}: {', '.join(files)}"))
        for line in _not_exported(folder):
            print(printable(line))
        if "tokenizer.json" not in files:
            print("without a tokenizer: the checkpoint has none, and --tokenizer names none")


def _not_exported(folder: str) -> list[str]:
    """Return lines on what a model has learned that transformers does not do with it."""
    from checkpointing.resumed import configuration

    with Index(folder) as index:
        options = sample_options(configuration(index), {})
    lines = []
    if options.get("objective") == "prefix":
        lines.append(
            "trained with --objective prefix: the tokens of a prompt saw all of it, and in "
            "transformers each sees those before it"
        )
    if model_record.form_of_texts(folder) == TEXT:
        lines.append(
            "names of special tokens are text in its corpora: transformers makes tokens of them, "
            "and text with split_special_tokens=True"
        )
    return lines


def _merge(sources: list[str], target: str, weights: str, averaged: bool) -> None:
    """Merge checkpoints, the oldest first, and print what was done; UserError for wrong options."""
    from checkpointing.merge import merge, shares_of  # they import torch

    found = [folders.find_checkpoints(source)[0] for source in sources]
    if len(found) < 2:
        raise UserError(f"a merge needs two checkpoints or more, not {len(found)}")
    twice = sorted({folder for folder in found if found.count(folder) > 1})
    if twice:
        raise UserError(f"{', '.join(twice)} is named twice: give it a larger number of --weights")
    steps = [folders.step_of(folder) for folder in found]
    if steps != sorted(steps):
        order = ", ".join(map(str, steps))
        raise CheckpointError(f"the checkpoints are of the steps {order}: name the oldest first")
    shares = shares_of(weights, len(found))
    for folder in found:
        check_files(folder, contents=True)
    print(printable("\n".join(merge(found, shares, target, averaged))))


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line: show, verify, merge, export and import."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("show", "the model, the step and the files"),
        ("verify", "compare all checksums"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("source", metavar="DIR", help="a checkpoint, or a run's folder")
    command = commands.add_parser("merge", help="average the weights of several checkpoints")
    command.add_argument(
        "--weights",
        default="equal",
        metavar="RULE",
        help="share of each checkpoint: equal (default), linear, 1-sqrt, ema:DECAY, or A,B,C",
    )
    command.add_argument(
        "--ema", action="store_true", help="merge the EMA weights (train.py --ema)"
    )
    command.add_argument(
        "sources", nargs="+", metavar="DIR", help="checkpoints, or runs' folders; the oldest first"
    )
    command.add_argument("target", metavar="OUT", help="a new folder")
    command = commands.add_parser("export", help="write the model for transformers")
    command.add_argument("--to", choices=("hf",), required=True)
    command.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="of the weights, default: as saved"
    )
    command.add_argument(
        "--family",
        choices=tuple(FAMILIES),
        help="transformers' model family, default: the first that has the model",
    )
    command.add_argument(
        "--ema", action="store_true", help="export the EMA weights (train.py --ema)"
    )
    text = "largest file, in GB (1e9 bytes; default: 5)"
    command.add_argument("--shard-gb", type=float, default=5.0, help=text)
    command.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a folder or a tokenizer.json, in place of the checkpoint's own",
    )
    command.add_argument("source", metavar="DIR", help="a checkpoint, or a run's folder")
    command.add_argument("target", metavar="OUT", help="a new folder")
    command = commands.add_parser("import", help="read a model of transformers")
    command.add_argument("--from", dest="origin", choices=("hf",), required=True)
    command.add_argument("source", metavar="DIR", help="folder with config.json and safetensors")
    command.add_argument("target", metavar="OUT", help="a new folder")
    return parser


if __name__ == "__main__":
    with errors.sentences():
        run_command(sys.argv[1:])
