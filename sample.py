"""Generates text with a trained model, or evaluates it on corpora or tasks, in any layout.

    python sample.py runs/demo --prompt "def main(" --temperature 0.8 --top-p 0.95 --seed 1
    mpirun -n 4 python sample.py runs/big/checkpoints/step_00001000 --tp 2 --pp 2 --prompt "The"
    python sample.py IMPORTED --chat
    python sample.py runs/demo --eval-data stories=data/stories:256 wiki=data/wiki
    python sample.py runs/demo --eval-tasks data/arc_easy.jsonl --scores scores.jsonl

RUN is the folder of a checkpoint, or of a run, whose newest checkpoint is taken. The tokenizer is
the tokenizer.json in the checkpoint or beside it, or PREFIX.tokenizer.json of the corpus that it
was trained on; without a tokenizer, prompts and output are token ids. --prompt may be given several
times. With --chat each line of the standard input is a message of a user.
"""

import argparse
import atexit
import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

# python -P and PYTHONSAFEPATH leave out the folder of the program.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

from base import errors  # imported first, because it refuses a Python that is too old

if __name__ == "__main__":
    errors.begin_program()

with errors.installed():
    from architecture.shape import ModelShape
    from base.cli import Parser
    from base.errors import FileError, UserError, exit_with, printable
    from base.paths import check_file, write_file
    from checkpointing import folders, model_record
    from checkpointing.index import Index, check_files, make_model
    from config import command_line, validation
    from config.command_line import add_options
    from config.corpus_record import note_on_form, with_end_token
    from config.inherited import OBJECTIVE, Inherited, sample_options
    from config.run_options import parse_eval_sets, parse_task_files
    from config.schema import Config
    from corpora import sample_order
    from corpora.chat_templates import ChatTemplate
    from corpora.conversation import END_OF_INPUT, Conversation, Lines
    from corpora.tasks import TaskSet, encode_tasks, results
    from corpora.text import Text, check_ids, find_tokenizer
    from corpora.token_files import note_on_answers
    from corpora.tokenizer_files import read_settings, read_template
    from distributed.context import Context, prepare, start
    from distributed.early_end import StartWatch, ending_all_ranks
    from distributed.launch import Launch, discover
    from distributed.store import StoreExchange

if TYPE_CHECKING:
    import numpy as np

    from inference.decoding import Decoder, SamplingParams
    from trainer import ModelState

MAX_TOKENS = 100  # new tokens for each prompt without --max-tokens
MAX_ANSWER = 1024  # new tokens for each answer of --chat without --max-tokens
SECONDS_FOR_LINE = 0.5  # the most that ranks wait for a line before they tell each other
# The defaults of the options that only --prompt and --chat use.
PROMPT_DEFAULTS: dict[str, Any] = {
    "max_tokens": None,
    "temperature": 0.8,
    "top_p": 0.95,
    "seed": 1234,
    "tokenizer": None,
    "chat_template": None,
    "system": None,
}
CHAT_ONLY = ("chat_template", "system")
EVAL_BATCH = 4  # samples in a micro-batch with --eval-data and --eval-tasks


@dataclasses.dataclass(frozen=True)
class OpenedCheckpoint:
    """What a checkpoint says of its model; its files are there, and have the right sizes.

    run_options: the options of the run that wrote it, by group.
    """

    folder: str
    model: ModelShape
    record: model_record.ModelRecord
    run_options: dict[str, Any]

    def text(self, tokenizer: str | None) -> Text:
        """Return what encodes its prompts; tokenizer: a tokenizer.json, None: its own.

        That is in the checkpoint, or for older versions in a folder above.
        """
        above = [os.path.join(self.folder, path) for path in ("", "..", "../..")]
        tokenizer = tokenizer or find_tokenizer(above, _corpora(self.run_options))
        return Text(tokenizer, self.model.vocab_size)

    def ends(self, text: Text) -> tuple[int, ...]:
        """Return the ids that end a text of this model."""
        record = self.record
        return record.ends if record.is_imported else record.ends or text.ends

    @property
    def longest_text(self) -> int:
        """The most tokens of a text that the model is made for, and that is computed as such."""
        limits = [max(self.record.context_length, self.model.seq_length)]
        limit = self.record.limit(self.model)
        if limit is not None:
            limits.append(limit)
        if self.model.positions == "learned":
            limits.append(self.model.max_positions)
        return min(limits)

    def new_tokens(self, longest: int, asked: int | None) -> int:
        """Return how many tokens are added to each prompt; UserError if they are too many.

        longest: the tokens of the longest prompt. asked: --max-tokens; None: MAX_TOKENS, or fewer,
        so that a prompt and its new tokens are no longer than the texts of the model.
        """
        count = asked or max(1, min(MAX_TOKENS, self.longest_text - longest))
        both = f"the longest prompt has {longest} tokens and --max-tokens is {count}: together "
        both += f"{longest + count}"
        self.record.check_length(self.model, longest + count, f"{both}, which")
        most = self.model.max_positions
        if self.model.positions == "learned" and longest + count > most:
            raise UserError(f"{both}, but max-positions is {most}")
        return count


def open_checkpoint(run: str, averaged: bool) -> OpenedCheckpoint:
    """Return what a run's newest checkpoint, or this one, says of its model; UserError.

    averaged: whether its average of weights (--ema) is wanted, which it may lack.
    """
    folder = folders.find_checkpoints(run)[0]
    check_files(folder, contents=False)
    with Index(folder) as index:
        index.weights_kind(averaged)  # refuses here, before ranks meet
        model = make_model(index.attributes("model"), index.path)
        run_options = json.loads(str(index.attributes("run")["config"]))
    record = model_record.read(folder, with_files=False)
    if record is None:  # a checkpoint of an older version
        record = model_record.without_tokenizer(model.seq_length)
    return OpenedCheckpoint(folder, model, record, run_options)


@dataclasses.dataclass(frozen=True)
class SampleTask:
    """A checked command line: the checkpoint, the options, and token ids of the prompts, if any.

    folder: the folder of the checkpoint. config: the configuration of the model and its layout.
    notes: lines on what it takes from the checkpoint, and on corpora and prompts. text: encodes the
    prompts and decodes the samples; None with --eval-data. count: the largest number of new tokens
    for each prompt or answer. ends: the ids that end a text. talk: the conversation of --chat;
    limit: the most tokens that it may have. tasks: those of --eval-tasks.
    """

    folder: str
    options: argparse.Namespace
    config: Config
    notes: tuple[str, ...] = ()
    text: Text | None = None
    prompts: tuple[list[int], ...] = ()
    count: int = 0
    ends: tuple[int, ...] = ()
    talk: Conversation | None = None
    limit: int = 0
    tasks: TaskSet | None = None


def prepare_task(options: argparse.Namespace, ranks: int) -> SampleTask:
    """Return the task of a command line; raise UserError if anything in it is wrong.

    Every rank calls this before torch is imported, and gets the same result. options: the result of
    `parse`, in which the options of PROMPT_DEFAULTS are missing unless the user gave them. ranks:
    the number of ranks.
    """
    tasks = {
        "--prompt": options.prompt is not None,
        "--chat": options.chat,
        "--eval-data": options.eval_data is not None,
        "--eval-tasks": options.eval_tasks is not None,
    }
    asked = [flag for flag, is_given in tasks.items() if is_given]
    if len(asked) != 1:
        which = f"{' and '.join(asked)} were" if asked else "none was"
        raise UserError(f"give one of {', '.join(tasks)}; {which} given")
    # An option that only another task uses must not be ignored silently.
    for name in PROMPT_DEFAULTS:
        flag = f"--{name.replace('_', '-')}"
        evaluates = options.eval_data or (options.eval_tasks and name != "tokenizer")
        if name in options and evaluates:
            raise UserError(f"{flag} goes with --prompt or --chat, not {asked[0]}")
        if name in options and name in CHAT_ONLY and not options.chat:
            raise UserError(f"{flag} goes with --chat, not --prompt")
    if options.scores and not options.eval_tasks:
        raise UserError(f"--scores {options.scores} needs --eval-tasks")
    check_file(options.scores)
    options = argparse.Namespace(**(PROMPT_DEFAULTS | vars(options)))
    check_numbers(options)
    opened = open_checkpoint(options.run, options.ema)
    folder, model, record = opened.folder, opened.model, opened.record
    taken = taken_from(opened, options)
    if options.eval_data:  # no prompts, and so no tokenizer
        record.check_length(model, model.seq_length, f"seq-length({model.seq_length})")
        return _evaluation(opened, options, ranks, taken)
    notes: tuple[str, ...] = (taken.note,) if taken.note else ()
    text = opened.text(options.tokenizer)
    if options.eval_tasks:
        record.check_length(model, model.seq_length, f"seq-length({model.seq_length})")
        files = parse_task_files(tuple(options.eval_tasks))
        config = make_config(options, model, ranks, taken)
        encoded = encode_tasks(files, text, model.seq_length)
        return SampleTask(folder, options, config, notes, tasks=encoded)
    ends = opened.ends(text)
    if options.chat:
        limit = opened.longest_text
        talk = _conversation(options, folder, text, ends)
        config = make_config(options, dataclasses.replace(model, seq_length=limit), ranks, taken)
        count = options.max_tokens or MAX_ANSWER
        return SampleTask(folder, options, config, notes, text, (), count, ends, talk, limit)
    prompts = tuple(text.encode(prompt) for prompt in options.prompt)
    longest = max(map(len, prompts))
    count = opened.new_tokens(longest, options.max_tokens)
    # Tables of positions have seq_length rows: as many as the longest continued prompt needs.
    model = dataclasses.replace(model, seq_length=longest + count)
    config = make_config(options, model, ranks, taken)
    notes = (*notes, *text.notes_on(options.prompt, "prompts"))
    return SampleTask(folder, options, config, notes, text, prompts, count, ends)


def taken_from(opened: OpenedCheckpoint, options: argparse.Namespace) -> Inherited:
    """Return what a task takes from its checkpoint: what decides how the model sees a text.

    Options that were given are not taken. Raise UserError if they do not go with the task.
    """
    given = {name: value for name, value in vars(options).items() if name in OBJECTIVE}
    if given and not options.eval_data:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{flags}: goes with --eval-data")
    taken = sample_options(opened.run_options, given)
    if not options.eval_data:  # a single text has no documents, and no labels that do not count
        taken = {name: taken[name] for name in ("objective",) if name in taken}
    return Inherited(taken, folder=opened.folder)


def _evaluation(
    opened: OpenedCheckpoint, options: argparse.Namespace, ranks: int, taken: Inherited
) -> SampleTask:
    """Return the task of --eval-data; UserError if a corpus cannot be read as in the run."""
    folder, model = opened.folder, opened.model
    form = model_record.form_of_texts(folder)  # what names of special tokens are for the model
    notes = [taken.note] if taken.note else []
    try:
        config, notes_on_corpora = with_end_token(_unchecked(options, model, ranks, taken))
        config = validation.check(config, ranks)
        sets = tuple(options.eval_data)
        sample_order.check_eval_sets(sets, model.seq_length, config.data.answers_only)
        notes += notes_on_corpora
        for each in parse_eval_sets(sets):
            notes += check_ids(each.prefix, model.vocab_size)
            notes += note_on_answers(each.prefix, config.data.answers_only)
            notes += note_on_form(each.prefix, form)
    except UserError as mistake:  # perhaps about an option that the user has not typed
        raise mistake.said("; ".join([str(mistake), *notes[:1]])) from None
    return SampleTask(folder, options, config, tuple(notes))


def _conversation(
    options: argparse.Namespace, folder: str, text: Text, ends: tuple[int, ...]
) -> Conversation:
    """Return the conversation of --chat, with the template of --chat-template or of the tokenizer.

    folder: the folder of the checkpoint. ends: the ids that end an answer. Raise UserError if there
    is no tokenizer, no template or no end.
    """
    if text.path is None:
        raise UserError(f"--chat: {folder} has no tokenizer: give --tokenizer PATH")
    if not ends:
        raise UserError(f"--chat: no token is known that ends an answer of {folder}")
    settings = read_settings(text.path)
    if options.chat_template:
        source = read_template(options.chat_template)
    else:
        source = settings.template()
    template = ChatTemplate(source, settings.tokens)
    return Conversation(template, text, options.system)


def check_numbers(options: argparse.Namespace) -> None:
    """Raise UserError if a number is out of its range, or if the tokenizer's file is missing."""
    temperature = options.temperature
    max_tokens = 1 if options.max_tokens is None else options.max_tokens
    for flag, value, is_valid, limits in (
        ("temperature", temperature, 0 <= temperature < math.inf, "at least 0 and finite"),
        ("top-p", options.top_p, 0 < options.top_p <= 1, "above 0 and at most 1"),
        ("max-tokens", max_tokens, 0 < max_tokens <= 2**20, f"from 1 to {2**20}"),
        ("seed", options.seed, 0 <= options.seed < 2**63, "at least 0 and below 2^63"),
    ):
        if not is_valid:
            raise UserError(f"--{flag} must be {limits}, not {value}")
    if options.tokenizer and os.path.isdir(options.tokenizer):
        options.tokenizer = os.path.join(options.tokenizer, "tokenizer.json")
    if options.tokenizer and not os.path.isfile(options.tokenizer):
        raise FileError(f"--tokenizer {options.tokenizer}: there is no such file")


def _corpora(run_options: dict[str, Any]) -> list[str]:
    """Return the --data of the run that wrote a checkpoint: prefixes, and weights as texts.

    run_options: the options of the run by group, read from the checkpoint.
    """
    data = run_options.get("data")
    words = data.get("data") if isinstance(data, dict) else None
    if not isinstance(words, list):
        return []
    return [word for word in words if isinstance(word, str)]


def make_config(
    options: argparse.Namespace, model: ModelShape, ranks: int, taken: Inherited
) -> Config:
    """Return the configuration of the model in the requested layout; UserError if it cannot be."""
    return validation.check(_unchecked(options, model, ranks, taken), ranks)


def _unchecked(
    options: argparse.Namespace, model: ModelShape, ranks: int, taken: Inherited
) -> Config:
    """Return the configuration of the model, with options that may not go together.

    taken: the options that come from the checkpoint. The trainer builds the model from a
    configuration of a run, so this is a run of one step without an optimizer. Weights are not drawn
    (init_std 0), because they are loaded.
    """
    micro_batch = EVAL_BATCH if options.eval_data or options.eval_tasks else 1
    # The ranks that tp and pp leave are replicas, and each needs a micro-batch of the global batch.
    replicas = max(1, ranks // (max(1, options.tp) * max(1, options.pp)))
    values = dataclasses.asdict(model) | dict(taken.options)
    values |= {name: value for name, value in vars(options).items() if name in OBJECTIVE}
    values |= {
        "tp": options.tp,
        "pp": options.pp,
        "sequence_parallel": False,
        "micro_batch_size": micro_batch,
        "global_batch_size": micro_batch * replicas,
        "steps": 1,
        "init_std": 0.0,
        "precision": options.precision,
        "device": options.device,
        "zero": 0,
        "overlap_param_gather": False,
        "sync_each_batch": True,
        "reshard_after_forward": True,
        "watchdog": ranks > 1,
        "out": _report_folder() if ranks > 1 else ".",
    }
    if options.eval_data:
        values["eval_data"] = options.eval_data
    return command_line.build(values)


def _report_folder() -> str:
    """Return a new folder of this user alone for the watchdog's report; removed at exit if empty.

    A folder of a known name in a shared place could be made by somebody else, or be their link.
    """
    folder = tempfile.mkdtemp(prefix="trine-sample-")

    def remove() -> None:
        with contextlib.suppress(OSError):  # it has a report
            os.rmdir(folder)

    atexit.register(remove)
    return folder


def load_model(
    config: Config, folder: str, averaged: bool, context: Context | None
) -> "ModelState":
    """Return this rank's part of a checkpoint's model; collective over all ranks.

    config: of `make_config`. averaged: whether to take the average of the weights. context: None
    for one rank on the CPU. Raise UserError for a damaged checkpoint.
    """
    with errors.installed():
        import trainer
        from checkpointing.load import load_weights

    state = trainer.build_model(config, context)
    mesh = state.factory.mesh
    mesh.recorder.enter("load")
    # Each rank compares the checksums of a part of the files.
    check_files(folder, True, mesh.rank, mesh.size)
    with Index(folder) as index:
        load_weights(state.stages, index, index.weights_kind(averaged))
    state.stages.to(state.factory.dtype)  # rounds the weights, which were loaded in fp32 or fp64
    return state


def run(task: SampleTask, context: Context) -> Iterator[str]:
    """Load the weights, and yield the continued prompts or the losses as lines of text.

    Collective over all ranks; called by `main`.
    """
    with errors.installed():
        import data
        import trainer
        from inference.decoding import Decoder, SamplingParams
        from inference.scoring import Scorer
        from optim import precision

    precision.check(task.config, context)
    splits = data.build(task.config)
    state = load_model(task.config, task.folder, task.options.ema, context)
    if context.rank == 0:
        tokenizer = f", tokenizer: {task.text.path or 'none'}" if task.text else ""
        print(f"note: {task.folder}{tokenizer}", file=sys.stderr, flush=True)
        for note in task.notes:
            print(printable(f"note: {note}"), file=sys.stderr, flush=True)
    if task.text is not None:
        options = task.options
        how = SamplingParams(options.temperature, options.top_p, options.seed)
        decoder = Decoder(state.pipeline, state.factory, task.config)
        for prompt in task.prompts:
            context.recorder.enter("sample")
            ids = decoder.generate(prompt, task.count, how, task.ends)
            yield task.text.decode(prompt + ids)
        if task.talk is not None:
            with task.talk:
                yield from _chat(task, task.talk, decoder, how, context)
    for name, (samples, count) in splits.eval_sets.items():
        loss = trainer.evaluate(state, samples, count)
        tokens = count * task.config.model.seq_length
        perplexity = math.exp(min(loss, 100.0))  # no overflow, whatever the loss
        yield f"{name}: loss {loss:.6f}, perplexity {perplexity:.4f}, {tokens} tokens"
    if task.tasks is not None:
        scorer = Scorer(state.pipeline, state.factory, task.config, task.tasks)
        log_likelihoods, misses = scorer.score()
        yield from task.tasks.notes
        for each in task.tasks.tasks:
            result = results(each, log_likelihoods, misses)
            yield (
                f"{each.name}: accuracy {result.accuracy:.6f}, normalised accuracy "
                f"{result.normalised_accuracy:.6f}, {result.bits_per_byte:.6f} bits per byte, "
                f"{len(each.rows)} rows"
            )
        if context.rank == 0 and task.options.scores:
            write_file(task.options.scores, _scores(task.tasks, log_likelihoods, misses))
    state.reader.close()


def _scores(tasks: TaskSet, log_likelihoods: "np.ndarray", misses: "np.ndarray") -> str:
    """Return the JSON lines of --scores: for each row its continuations' log-likelihoods (nats).

    log_likelihoods, misses: by request; see scoring.Scorer.score.
    """
    lines = []
    for task in tasks.tasks:
        for number, row in enumerate(task.rows):
            numbers = list(row.requests)
            facts = {"task": task.name, "row": number, "answers": row.answers}
            facts["log_likelihoods"] = log_likelihoods[numbers].tolist()
            facts["greedy"] = (misses[numbers] == 0).tolist()
            lines.append(json.dumps(facts) + "\n")
    return "".join(lines)


def _chat(
    task: SampleTask,
    talk: Conversation,
    decoder: "Decoder",
    how: "SamplingParams",
    context: Context,
) -> Iterator[str]:
    """Yield an answer for each line of the standard input of rank 0; collective over all ranks.

    Raise UserError if the template refuses the conversation, or if it is too long for the model.
    """
    exchange = StoreExchange(context.store, context.rank, context.size, "chat", context.recorder)
    lines = Lines() if context.rank == 0 else None
    marks = lines is not None and sys.stdin.isatty()
    while True:
        if marks:
            print("> ", end="", file=sys.stderr, flush=True)
        turn = None
        while turn is None:  # the watchdog counts each exchange as progress while the user types
            context.recorder.enter("sample")
            own = _next_turn(task, talk, lines) if lines is not None else None
            turn = exchange.agree(own, lambda turns: turns[0])
        if "error" in turn:
            raise UserError(turn["error"])
        if not turn["prompt"]:
            return
        count = min(task.count, task.limit - len(turn["prompt"]))
        yield talk.answer(decoder.generate(turn["prompt"], count, how, task.ends))


def _next_turn(task: SampleTask, talk: Conversation, lines: Lines) -> dict[str, Any] | None:
    """Return the ids of the conversation with the next line, {"prompt": [...]}; None: none came.

    The list is empty after the last line. If the conversation is refused or has no room for an
    answer, the result is {"error": a sentence}. Called on rank 0 only.
    """
    try:
        line = lines.next(SECONDS_FOR_LINE)
        if line is None:
            return None
        ids = talk.prompt(line) if line != END_OF_INPUT else []
    except UserError as error:
        return {"error": str(error)}
    if len(ids) >= task.limit:
        return {
            "error": f"the conversation has {len(ids)} tokens, and the texts of this model "
            f"{task.limit} at most"
        }
    return {"prompt": ids}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command line; raise UserError if they are malformed.

    Options without a default here, such as --max-tokens, are missing in the result unless the user
    gave them. So `prepare_task` can refuse those that do not go with --eval-data; then it adds the
    defaults (PROMPT_DEFAULTS).
    """
    parser = Parser.described(__doc__)
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run or of a checkpoint")
    add("--ema", action="store_true", default=False, help="use the EMA weights (train.py --ema)")
    add("--prompt", action="append", default=None, metavar="TEXT", help="text to continue")
    add("--chat", action="store_true", default=False, help="answer each line of stdin")
    text = f"most new tokens (default: {MAX_TOKENS}, with --chat {MAX_ANSWER}; at most the "
    text += "model's context)"
    add("--max-tokens", type=int, metavar="N", help=text)
    add("--temperature", type=float, metavar="T", help="0: greedy (default: 0.8)")
    add("--top-p", type=float, metavar="P", help="nucleus sampling (default: 0.95)")
    add("--seed", type=int, metavar="N", help="seed of the sampling (default: 1234)")
    add("--tokenizer", metavar="PATH", help="a tokenizer.json, or a folder with one")
    text = "Jinja template for --chat (default: the tokenizer's)"
    add("--chat-template", metavar="FILE", help=text)
    add("--system", metavar="TEXT", help="system message for --chat")
    text = "print the loss on these corpora, on all samples or this many"
    add("--eval-data", nargs="+", default=None, metavar="NAME=PREFIX[:SAMPLES]", help=text)
    text = "print the accuracy on these multiple-choice tasks, on all rows or this many"
    add("--eval-tasks", nargs="+", default=None, metavar="[NAME=]FILE[:ROWS]", help=text)
    text = "write each row's log-likelihoods as JSON lines"
    add("--scores", default=None, metavar="FILE", help=text)
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    add("--pp", type=int, default=1, metavar="N", help="pipeline-parallel ranks (default: 1)")
    add_options(parser, OBJECTIVE, "what --eval-data counts (default: as in the run)")
    precisions = "fp64|fp32|bf16|fp16"
    add("--precision", default="fp32", metavar=precisions, help="arithmetic (default: fp32)")
    text = "device of each rank (default: auto)"
    add("--device", default="auto", metavar="auto|cpu|cuda", help=text)
    return parser.parse_args(arguments)


def main(arguments: list[str], watch: StartWatch) -> None:
    """Check the command line before torch is imported, then run the task and print its lines.

    A UserError is printed on rank 0, and ends every rank with exit status 2. watch: the process
    that ends the job if this rank dies while the ranks start.
    """
    launch = Launch("python")
    try:
        launch = dataclasses.replace(discover(), watch=watch)
        task = prepare_task(parse(arguments), launch.size)
    except UserError as mistake:
        exit_with(mistake, launch.rank == 0, launch.exit_delay)
    config = task.config  # set variables that torch, CUDA and NCCL read
    prepare(config.run, config.layout.pp, config.model.experts)
    watch.follow(task.config.run.out)  # the folder for the report of a death
    context = start(launch, task.config.run)
    watch.close()  # the ranks have met: `context` ends them all if one fails from here on
    with context.failing_loudly():
        for line in run(task, context):
            if context.rank == 0:
                with errors.sentences():  # nobody may read the output any more
                    print(printable(line).rstrip("\n"), flush=True)
    context.stop()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the program without a traceback
    watch = StartWatch()
    watch.begin()
    with ending_all_ranks(watch):
        main(sys.argv[1:], watch)
