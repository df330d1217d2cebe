"""Multiple-choice tasks of --eval-tasks: rows of files, their tokens, and the results of a task.

    found = read_tasks(config)                         UserError if a file or a row is wrong
    packed = pack(found.requests, seq_length, at_once=8)
    results(found.tasks[0], log_likelihoods, misses)   accuracy and others, from a number a request

A row of a file is a JSON object in a line, in one of two forms:

    {"context": "Q: 2 + 2 =\\nA:", "continuations": [" 4", " 5"], "answer": 0}
    {"arguments": ..., "target": ...}                  what lm_eval --log_samples writes

`context` may be a list with a text for each continuation, as in Winogrande. `answer` is the number
of the right continuation from 0, a list of such numbers, or the right continuation itself. A row
with one continuation asks whether the model would write it: whether each of its tokens is the
likeliest one.

A request is a text of which the tokens after a context are scored. It is cut into tokens as
lm_eval cuts it: context and continuation are encoded together, without the white space that ends
the context, and the continuation has the tokens after those of the context alone. Equal requests
are scored once. Several requests share a sample, each seeing only its own tokens.
"""

import bisect
import contextlib
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from base.errors import CorpusError, UserError
from config.run_options import TaskFile, parse_task_files
from config.schema import Config
from corpora.objectives import NO_TARGET
from corpora.text import Text, text_of_run
from corpora.text_sources import BadTexts, damage_named, objects_of


class Choices(NamedTuple):
    """A row as its file has it. place: FILE:LINE. pairs: a context and a continuation for each
    choice. answers: the numbers of the right choices.
    """

    place: str
    pairs: tuple[tuple[str, str], ...]
    answers: tuple[int, ...]


class ScoringRequest(NamedTuple):
    """A text to score. ids: its tokens. start: the place of the first token that is scored."""

    ids: list[int]
    start: int


@dataclass(frozen=True)
class TaskRow:
    """A row of a task. requests: the number of each choice's request. answers: the right choices.

    lengths: the bytes of each continuation without white space before it, by which the normalised
    accuracy divides. bytes: those of all that is scored of a choice, for the bits per byte.
    """

    requests: tuple[int, ...]
    answers: tuple[int, ...]
    lengths: tuple[int, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """The rows of a file; name: that of the task in the log."""

    name: str
    rows: list[TaskRow]


@dataclass(frozen=True)
class TaskSet:
    """All tasks of a run, and the requests of all their rows. notes: lines for the log."""

    tasks: list[Task] = field(default_factory=list)
    requests: list[ScoringRequest] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def digest(self) -> int:
        """A number that differs, most probably, from that of other requests."""
        digest = 0
        for request in self.requests:
            digest = zlib.crc32(np.array([request.start, *request.ids]).tobytes(), digest)
        return digest

    @property
    def tokens(self) -> int:
        """The tokens that a model reads to score all requests: all but the last of each."""
        return sum(len(request.ids) - 1 for request in self.requests)


class TaskResult(NamedTuple):
    """The result of a task; see `results`."""

    accuracy: float
    normalised_accuracy: float
    bits_per_byte: float


# ---- Rows of files -------------------------------------------------------------------------------


def read_rows(file: TaskFile) -> list[Choices]:
    """Return the rows of a file of --eval-tasks; UserError with FILE:LINE for a row that is wrong.

    The file is read as all JSON lines are (text_sources.py), also compressed.
    """
    rows: list[Choices] = []
    path = Path(file.path)
    try:
        with damage_named(path):
            for place, found in objects_of(path, ("continuations", "arguments"), BadTexts()):
                if len(rows) == file.rows:
                    break
                try:
                    rows.append(_row(place, found))
                except UserError as mistake:
                    raise CorpusError(f"{place} {mistake}") from None
    except OSError as error:
        raise CorpusError(f"--eval-tasks: cannot read {path}: {error.strerror}") from None
    if not rows:
        raise CorpusError(f"--eval-tasks: {path} has no row")
    if file.rows is not None and len(rows) < file.rows:
        raise CorpusError(
            f"--eval-tasks {file.name} asks for {file.rows} rows, {path} has {len(rows)}"
        )
    return rows


def _row(place: str, found: dict[str, Any]) -> Choices:
    """Return a row in one of the two forms; the UserError goes on after FILE:LINE."""
    if "continuations" in found:
        pairs = _pairs_of(found.get("context"), found["continuations"])
        answers = _answers_of(found.get("answer"), pairs)
    else:
        pairs = _arguments_of(found["arguments"])
        # With acc_mutual_info, lm_eval scores each continuation without its context too.
        metrics = found.get("metrics")
        half = len(pairs) // 2
        if isinstance(metrics, list) and "acc_mutual_info" in metrics and half:
            pairs = pairs[:half]
        answers = _target_of(found.get("target"), pairs)
    return Choices(place, pairs, answers)


def _pairs_of(context: Any, continuations: Any) -> tuple[tuple[str, str], ...]:
    """Return the (context, continuation) of each choice of a row of our own form.

    context: a text for all, or one for each continuation.
    """
    if not _are_texts(continuations) or not continuations:
        raise CorpusError('has no list of texts as "continuations"')
    contexts = [context] * len(continuations) if isinstance(context, str) else context
    if not _are_texts(contexts):
        raise CorpusError('has no "context" that is a text, or a list of texts')
    if len(contexts) != len(continuations):
        raise CorpusError(f"has {len(contexts)} contexts for {len(continuations)} continuations")
    return tuple(zip(contexts, continuations, strict=True))


def _arguments_of(arguments: Any) -> tuple[tuple[str, str], ...]:
    """Return the pairs in the "arguments" of lm_eval: {"gen_args_0": {"arg_0": ...}} or a list."""
    listed = list(arguments.values()) if isinstance(arguments, dict) else arguments
    if not isinstance(listed, list) or not listed:
        raise CorpusError('has no pairs of a context and a continuation as "arguments"')
    pairs = []
    for entry in listed:
        pair = list(entry.values()) if isinstance(entry, dict) else entry
        if isinstance(pair, list) and len(pair) == 1 and _are_texts(pair):
            raise CorpusError("scores a whole text: prepare a corpus of it, for --eval-data")
        if not isinstance(pair, list) or len(pair) != 2 or not _are_texts(pair):
            raise CorpusError("is of a task that generates text, or has no pairs of texts")
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _answers_of(answer: Any, pairs: Sequence[tuple[str, str]]) -> tuple[int, ...]:
    """Return the indices of the right choices of a row of our own form.

    answer: an index, a list of them, or the text of one continuation.
    """
    if isinstance(answer, str):
        same = _with_text(answer, pairs)
        if len(same) != 1:
            times = f"{len(same)} of its {len(pairs)} continuations"
            raise CorpusError(f"has the answer {answer!r:.60}, which is {times}")
        return same
    listed = answer if isinstance(answer, list) else [answer]
    for number in listed:
        if not isinstance(number, int) or isinstance(number, bool):
            raise CorpusError(f'has no number of a continuation as "answer": {number!r:.60}')
        if not 0 <= number < len(pairs):
            raise CorpusError(f"has the answer {number}, and continuations 0 to {len(pairs) - 1}")
    if not listed:
        raise CorpusError('has an empty list as "answer"')
    return tuple(sorted(set(listed)))


def _with_text(text: str, pairs: Sequence[tuple[str, str]]) -> tuple[int, ...]:
    """Return the numbers of the continuations that are a text, but for white space around it."""
    return tuple(n for n, (_, each) in enumerate(pairs) if each.strip() == text.strip())


def _target_of(target: Any, pairs: Sequence[tuple[str, str]]) -> tuple[int, ...]:
    """Return the numbers of the right choices in a row of lm_eval, which has them as a text.

    The text is that of a number, of a list of numbers, or the right continuation.
    """
    if len(pairs) == 1:
        return (0,)
    if not isinstance(target, str):
        return _answers_of(target, pairs)
    same = _with_text(target, pairs)
    by_number = None
    with contextlib.suppress(ValueError, RecursionError):
        number: Any = json.loads(target)
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if isinstance(number, list) or (is_whole and 0 <= number < len(pairs)):
            by_number = _answers_of(number, pairs)
    if by_number is not None and same and by_number != same:
        raise CorpusError(
            f"has the target {target!r:.60}, which is the number of one continuation and the text "
            "of another: make the file by scripts/eval_tasks.py"
        )
    if by_number is not None:
        return by_number
    if len(same) != 1:
        times = f"{len(same)} of its {len(pairs)} continuations"
        raise CorpusError(
            f"has the target {target!r:.60}, which is {times}: make the file by "
            "scripts/eval_tasks.py"
        )
    return same


# ---- Tokens --------------------------------------------------------------------------------------


def read_tasks(config: Config) -> TaskSet:
    """Return the tasks of --eval-tasks with their requests as tokens of the run's tokenizer.

    Raise UserError if a file or a row is wrong, or if a continuation is longer than seq_length.
    """
    files = parse_task_files(config.data.eval_tasks or ())
    if not files:
        return TaskSet()
    return encode_tasks(files, text_of_run(config), config.model.seq_length)


def encode_tasks(files: Sequence[TaskFile], text: Text, length: int) -> TaskSet:
    """Return the tasks in these files. text: the encoder. length: the most tokens of a sample."""
    found = TaskSet()
    numbers: dict[tuple, int] = {}  # the number of each request
    for file in files:
        rows = []
        cut = 0  # requests whose context lost its beginning
        read = read_rows(file)
        requests = _requests(read, text)
        for choices in read:
            of_row = []
            for pair in choices.pairs:
                request, is_cut = _within(next(requests), length, choices.place, pair[1])
                cut += is_cut
                key = (request.start, *request.ids)
                if key not in numbers:
                    numbers[key] = len(found.requests)
                    found.requests.append(request)
                of_row.append(numbers[key])
            texts = [continuation for _, continuation in choices.pairs]
            lengths = tuple(max(1, len(each.lstrip().encode())) for each in texts)
            sizes = tuple(len(_split(*pair)[1].encode()) for pair in choices.pairs)
            rows.append(TaskRow(tuple(of_row), choices.answers, lengths, sizes))
        found.tasks.append(Task(file.name, rows))
        note = f"task {file.name}: {len(rows):,} rows of {file.path}"
        if cut:
            note += f"; {cut:,} texts lose the beginning of their context, seq-length is {length}"
        found.notes.append(note)
        texts_of_file = [part for choices in read for pair in choices.pairs for part in pair]
        found.notes.extend(text.notes_on(texts_of_file, f"texts of the task {file.name}"))
    return found


def _requests(rows: Sequence[Choices], text: Text) -> Iterator[ScoringRequest]:
    """Yield the token ids to score for each choice of each row, in their order.

    Raise UserError if a continuation has no token of its own, or does not fit.
    """
    encoder = text.encoder
    if encoder is None:
        for row in rows:
            for context, continuation in row.pairs:
                yield _request_of_ids(context, continuation, text, row.place)
        return
    pairs = [_split(*pair) for row in rows for pair in row.pairs]
    wholes = encoder.prompts([context + continuation for context, continuation in pairs])
    names = sorted({context for context, _ in pairs if context})
    starts = dict(zip(names, map(len, encoder.prompts(names)), strict=True))
    starts[""] = len(encoder.begin)
    places = (row.place for row in rows for _ in row.pairs)
    for place, (context, continuation), ids in zip(places, pairs, wholes, strict=True):
        start = starts[context]
        if not start:  # a text that nothing begins follows the end of another
            if encoder.end is None:
                raise CorpusError(f"{place}: no token can stand in place of an empty context")
            ids = ids if ids[:1] == [encoder.end] else [encoder.end, *ids]
            start = 1
        if len(ids) <= start:
            raise CorpusError(
                f"{place}: the continuation {continuation!r:.60} has no token of its own: the "
                "tokenizer joins it with the end of its context"
            )
        if max(ids) >= text.vocab_size:
            raise CorpusError(
                f"{place}: token id {max(ids)} is not below vocab-size({text.vocab_size}): take "
                "the tokenizer of the model"
            )
        yield ScoringRequest(ids, start)


def _split(context: str, continuation: str) -> tuple[str, str]:
    """Return the text before what is scored and what is scored.

    The white space that ends the context is scored with the continuation, as in lm_eval.
    """
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _request_of_ids(context: str, continuation: str, text: Text, place: str) -> ScoringRequest:
    """Return the request of a row whose texts are token ids such as '17 4 250'."""
    parts = []
    for words in (context, continuation):
        ids = text.numbers(words)
        if ids is None:
            raise CorpusError(
                f"{place}: {words!r:.60} is no list of token ids such as '17 4 250', and no "
                "tokenizer was found beside the corpus"
            )
        if max(ids) >= text.vocab_size:
            raise CorpusError(
                f"{place}: token id {max(ids)} is not below vocab-size({text.vocab_size})"
            )
        parts.append(ids)
    return ScoringRequest(parts[0] + parts[1], len(parts[0]))


def _within(
    request: ScoringRequest, length: int, place: str, continuation: str
) -> tuple[ScoringRequest, bool]:
    """Return the request with at most length + 1 tokens, the last ones, and whether it was cut."""
    scored = len(request.ids) - request.start
    if scored > length:
        raise CorpusError(
            f"{place}: the continuation {continuation!r:.60} has {scored} tokens: seq-length is "
            f"{length}"
        )
    surplus = len(request.ids) - length - 1
    if surplus <= 0:
        return request, False
    return ScoringRequest(request.ids[surplus:], request.start - surplus), True


# ---- Samples -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """Requests in samples of seq_length tokens. samples: the numbers of each sample's requests.

    short: the number of first samples whose texts have at most `limit` tokens; see `pack`. prefix:
    whether the tokens of a context see all of it, as with --objective prefix.
    """

    requests: Sequence[ScoringRequest]
    samples: list[list[int]]
    length: int
    short: int
    prefix: bool = False

    def arrays(self, number: int) -> dict[str, np.ndarray]:
        """Return a sample as rows of a micro-batch: data.Batch's arrays, (seq_length,) each.

        A number beyond the last sample is a sample without requests. A token beyond the last
        request sees itself. The array `rows` has for each label the number of its request.
        """
        places = np.arange(self.length)
        arrays = {
            "tokens": np.zeros(self.length, np.int64),
            "labels": np.full(self.length, NO_TARGET),
            "starts": places.copy(),
            "stops": places + 1,
            "positions": np.zeros(self.length, np.int64),
            "rows": np.zeros(self.length, np.int64),
        }
        begin = 0
        for request_number in self.samples[number] if number < len(self.samples) else []:
            ids, start = self.requests[request_number]
            stop = begin + len(ids) - 1
            arrays["tokens"][begin:stop] = ids[:-1]
            arrays["labels"][begin + start - 1 : stop] = ids[start:]
            arrays["starts"][begin:stop] = begin
            if self.prefix:
                arrays["stops"][begin : begin + start] = begin + start
            arrays["positions"][begin:stop] = places[: stop - begin]
            arrays["rows"][begin:stop] = request_number
            begin = stop
        return arrays


def pack(
    requests: Sequence[ScoringRequest],
    length: int,
    at_once: int = 1,
    limit: int | None = None,
    prefix: bool = False,
) -> Packed:
    """Return the requests in few samples of `length` tokens, the same for equal requests.

    at_once: the samples of a micro-batch of all replicas. limit: texts of more tokens are in other
    micro-batches than those of fewer, because their positions are computed otherwise (longrope).
    prefix: see Packed.
    """
    sizes = [len(request.ids) - 1 for request in requests]
    short = [n for n, size in enumerate(sizes) if limit is None or size <= limit]
    samples = _best_fit(short, sizes, length)
    if limit is None:
        return Packed(requests, samples, length, len(samples), prefix)
    while len(samples) % at_once:
        samples.append([])
    of_short = len(samples)
    others = sorted(set(range(len(sizes))) - set(short))
    return Packed(requests, samples + _best_fit(others, sizes, length), length, of_short, prefix)


def _best_fit(numbers: Sequence[int], sizes: Sequence[int], room: int) -> list[list[int]]:
    """Return the numbers in samples whose sizes add up to at most `room`.

    The largest is placed first, each into the sample with the least room that suffices.
    """
    samples: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # room and number of each sample, ascending
    for number in sorted(numbers, key=lambda number: (-sizes[number], number)):
        size = sizes[number]
        place = bisect.bisect_left(rooms, (size, -1))
        if place == len(rooms):
            left, sample = room, len(samples)
            samples.append([])
        else:
            left, sample = rooms.pop(place)
        samples[sample].append(number)
        if left > size:
            bisect.insort(rooms, (left - size, sample))
    return samples


# ---- Results -------------------------------------------------------------------------------------


def results(task: Task, log_likelihoods: np.ndarray, misses: np.ndarray) -> TaskResult:
    """Return the shares of rows that are answered rightly, and the bits per byte of the answers.

    log_likelihoods: of each request, the sum of the logarithms of its scored tokens' probabilities
    (nats). misses: the number of its scored tokens that are not the likeliest.

    accuracy: the continuation of the largest log-likelihood is an answer. normalised: that of the
    largest log-likelihood over its bytes is, as lm_eval's acc_bytes, which for ASCII is its
    acc_norm. Both are 1 for a row of one continuation without misses. bits per byte: the negative
    log-likelihoods of the rows' answers, of several the likeliest, over their bytes. All are NaN if
    a log-likelihood is NaN.
    """
    right = normalised = 0
    bits = count = 0.0
    for row in task.rows:
        values = log_likelihoods[list(row.requests)]
        if np.isnan(values).any():
            return TaskResult(math.nan, math.nan, math.nan)
        if len(values) == 1:
            is_right = misses[row.requests[0]] == 0
            right += is_right
            normalised += is_right
        else:
            right += int(values.argmax()) in row.answers
            normalised += int((values / row.lengths).argmax()) in row.answers
        answer = max(row.answers, key=lambda number: values[number])
        bits -= values[answer] / math.log(2)
        count += row.bytes[answer]
    rows = len(task.rows)
    return TaskResult(float(right / rows), float(normalised / rows), float(bits / count))
