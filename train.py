"""Trains a GPT: one run, from its configuration to its last row of metrics.

    python train.py --model gpt2-124m --data synthetic --steps 20 --global-batch-size 8
    mpirun -n 4 python train.py --config run.toml --tp 2 --pp 2
    srun -n 384 python train.py --model bloom-176b --tp 4 --pp 12 ...
    torchrun --nproc-per-node 8 train.py --tp 8 ...

dp follows from the number of ranks. `--help` lists the options that people use first, `--help
data` those of one group, `--help all` every option.
"""

import os
import signal
import sys

if __name__ == "__main__":
    # A signal that arrives during the imports below is delivered when Signals() can handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})

# python -P and PYTHONSAFEPATH leave out the folder of the program.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

from base import errors  # imported first, because it refuses a Python that is too old
from distributed.early_end import StartWatch, ending_all_ranks

watch = StartWatch()
signals = None
if __name__ == "__main__":
    errors.begin_program()
    watch.begin()
with ending_all_ranks(watch), errors.installed():
    from distributed.heap import share_heap
    from distributed.stop_conditions import Signals

    if __name__ == "__main__":
        share_heap()
        signals = Signals()  # from here on a signal is answered, during the slow imports too

    from collections.abc import Mapping
    from dataclasses import replace
    from typing import Any

    import psutil

    from base.errors import UserError, exit_with, printable
    from config import corpus_record
    from config.command_line import parse_request
    from config.inherited import Inherited
    from config.run_options import parse_eval_sets
    from config.run_paths import check_paths
    from config.schema import Config
    from config.timeline import Timeline
    from config.validation import check
    from costs.run_size import elements_of_run
    from distributed.context import prepare
    from distributed.launch import Launch, check_launch, discover
    from telemetry import trackers

# The largest number of tensor elements, optimizer state and copies included, of a run that fits on
# every node: for a smaller run `check_memory` computes nothing.
SMALL_RUN = 10_000_000


def main(arguments: list[str], watch: StartWatch, signals: Signals) -> None:
    """Check the options, train, and exit with the status of the run; every rank calls this.

    --help is answered, and errors in the options are reported, before torch is imported. arguments:
    the words of the command line. watch: the process that ends the job if this rank dies before its
    first step is done. signals: has taken over the signals.
    """
    launch = Launch("python")  # if `discover` fails, its error is printed as by a single process
    try:
        launch = replace(discover(), watch=watch)
        signals.follow(launch)  # SIGTERM or Ctrl-C now ends all ranks, until they have met
        warning = check_launch(launch)
        if warning:
            print(f"note: {warning}", file=sys.stderr, flush=True)
        request = parse_request(arguments, __doc__, resumed=checkpoint_options)
        try:
            config = check(request.config, launch.size)
        except UserError as mistake:  # perhaps about an option that the user has not typed
            raise mistake.said(
                "; ".join(filter(None, [str(mistake), request.taken.note]))
            ) from None
        watch.follow(config.run.out)  # the folder for the report of a death
    except UserError as mistake:
        exit_with(mistake, launch.rank == 0, launch.exit_delay)
    if launch.rank == 0:
        check_machine(config)
        for note in request.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
    # Set variables that torch, CUDA and NCCL read.
    prepare(config.run, config.layout.pp, config.model.experts)
    with errors.installed():
        import trainer
    trainer.main(config, launch, signals)


def checkpoint_options(given: Mapping[str, Any]) -> Inherited:
    """Return what a run takes from the checkpoint of --resume; given: the options by name."""
    from checkpointing import resumed  # imported here: h5py takes time, and few starts resume

    return resumed.inherited_options(given)


def check_machine(config: Config) -> None:
    """End the job with an error if a path, the data, a tracker or this node's memory is not usable.

    Called by rank 0 only, before torch is imported.
    """
    try:
        with errors.installed():
            check_paths(config)
            check_memory(config)
            check_data(config)
            if config.run.tensorboard or config.run.wandb:
                trackers.check(config)
    except UserError as mistake:
        exit_with(mistake)


def check_memory(config: Config) -> None:
    """Raise UserError if this node has less memory than its ranks certainly need.

    The planner computes a lower bound of the need. Nothing is computed for a run with fewer
    than SMALL_RUN elements. Memory includes swap space.
    """
    if elements_of_run(config) < SMALL_RUN:
        return
    from costs import memory

    node_bytes = psutil.virtual_memory().total + psutil.swap_memory().total
    memory.check_fits(memory.least_of_run(config), config, node_bytes)


def check_data(config: Config) -> None:
    """Raise UserError if token files, tasks or prompts of the options cannot be used.

    Print a note if the vocabulary is larger than the corpora's tokenizer needs.
    """
    from corpora import blends, sample_order, tasks, text, token_files  # they import numpy

    options = config.data
    synthetic = options.data == ("synthetic",)
    if options.eval_tasks:
        tasks.read_tasks(config)
    if synthetic and not options.eval_data and not config.run.sample_prompt:
        return
    # Functions that return something are called here for the errors that they raise.
    sample_order.split_ranges(options.split, 0)
    eval_sets = options.eval_data or ()
    sample_order.check_eval_sets(eval_sets, config.model.seq_length, options.answers_only)
    prefixes: list[str] = []
    if not synthetic:
        words = [options.data, *(phase.data for phase in Timeline(config).phases_left)]
        prefixes = [prefix for data in words for prefix in blends.parse_blend(data)[0]]
        for prefix in dict.fromkeys(prefixes):
            token_files.check_pair(prefix, options.answers_only)
    evaluated = [each.prefix for each in parse_eval_sets(eval_sets)]
    form = corpus_record.form_of(prefixes)
    notes = [note for prefix in evaluated for note in corpus_record.note_on_form(prefix, form)]
    for prefix in dict.fromkeys([*prefixes, *evaluated]):
        notes += text.check_ids(prefix, config.model.vocab_size)
        notes += token_files.note_on_answers(prefix, options.answers_only)
    encoder, _ = text.prompts_of_run(config)
    notes += encoder.notes_on(config.run.sample_prompt or (), "prompts")
    note = text.unused_rows(config)
    if note:
        notes.append(note)
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with ending_all_ranks(watch):
        assert signals is not None  # made above
        main(sys.argv[1:], watch, signals)
