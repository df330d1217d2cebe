"""Tasks during a run: if this failed, an accuracy would be another model's, or a layout's."""

import gzip
import json
import math
import random

import lm_eval_cases
import numpy as np
import pytest
import task_worker
import torch
from compare import relative_difference
from hypothesis import given
from hypothesis import strategies as st
from lm_eval_cases import FIXTURES, S
from ranks import fork_one, results_of
from test_families import V, their_model

import trainer
from base.errors import UserError
from checkpointing import hf_export
from checkpointing.index import Index
from checkpointing.load import load_weights
from config import validation
from config.command_line import parse
from config.run_options import TaskFile, parse_task_files
from corpora import tasks
from corpora.text import Text
from inference.scoring import Scorer

# ------------------------------------------------------------------------------------------------
# Rows and tokens
# ------------------------------------------------------------------------------------------------


PAIRS = (("1", " 2"), ("1", " 3"))
OF_LM_EVAL = {
    "gen_args_0": {"arg_0": "1", "arg_1": " 2"},
    "gen_args_1": {"arg_0": "1", "arg_1": " 3"},
}
BLANK = {"arguments": [["1 _", " 5"], ["2 _", " 5"]]}
ROWS = {
    "number": ({"context": "1", "continuations": [" 2", " 3"], "answer": 1}, PAIRS, (1,)),
    "several": ({"context": "1", "continuations": [" 2", " 3"], "answer": [1, 0]}, PAIRS, (0, 1)),
    "text": ({"context": "1", "continuations": [" 2", " 3"], "answer": "3"}, PAIRS, (1,)),
    "contexts": (
        {"context": ["1", "4"], "continuations": [" 2", " 2"], "answer": 0},
        (("1", " 2"), ("4", " 2")),
        (0,),
    ),
    "lm_eval": ({"arguments": OF_LM_EVAL, "target": "1"}, PAIRS, (1,)),
    "lm_eval list": ({"arguments": [["1", " 2"], ["1", " 3"]], "target": 0}, PAIRS, (0,)),
    "lm_eval several": ({"arguments": OF_LM_EVAL, "target": "[0, 1]"}, PAIRS, (0, 1)),
    "lm_eval text": ({"arguments": OF_LM_EVAL, "target": "3"}, PAIRS, (1,)),
    "lm_eval words": (
        {"arguments": [["a", " true"], ["a", " false"]], "target": "false"},
        (("a", " true"), ("a", " false")),
        (1,),
    ),
    "lm_eval one": ({"arguments": [["a b", " c"]], "target": " c"}, (("a b", " c"),), (0,)),
    "lm_eval mutual": (
        {
            "arguments": [["1", " 2"], ["1", " 3"], ["", " 2"], ["", " 3"]],
            "target": "1",
            "metrics": ["acc", "acc_mutual_info"],
        },
        PAIRS,
        (1,),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_in_each_form(name, tmp_path):
    row, pairs, answers = ROWS[name]
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" + json.dumps(row).encode() + b"\n"))
    [choices] = tasks.read_rows(TaskFile("t", str(path), None))
    assert choices == tasks.Choices(f"{path}:2", pairs, answers)


WRONG = {
    '{"context": "a"}': "has no key 'continuations' and no 'arguments'",
    '{"continuations": ["a"], "answer": 0}': 'has no "context" that is a text',
    '{"context": "a", "continuations": [], "answer": 0}': "has no list of texts",
    '{"context": "a", "continuations": ["b", 3], "answer": 0}': "has no list of texts",
    '{"context": ["a"], "continuations": ["b", "c"], "answer": 0}': "1 contexts for 2",
    '{"context": "a", "continuations": ["b", "c"]}': "has no number of a continuation",
    '{"context": "a", "continuations": ["b", "c"], "answer": 2}': "answer 2, and continuations 0",
    '{"context": "a", "continuations": ["b", "c"], "answer": -1}': "answer -1, and continuations",
    '{"context": "a", "continuations": ["b", "c"], "answer": true}': "has no number of",
    '{"context": "a", "continuations": ["b", "c"], "answer": []}': "has an empty list",
    '{"context": "a", "continuations": ["b", "c"], "answer": "d"}': "which is 0 of its 2",
    '{"context": "a", "continuations": ["b", " b"], "answer": "b"}': "which is 2 of its 2",
    '{"arguments": [["a"]], "target": ""}': "scores a whole text",
    '{"arguments": [["a", {"until": []}]], "target": ""}': "is of a task that generates text",
    '{"arguments": 3, "target": ""}': "has no pairs of a context",
    '{"arguments": [["a", " 1"], ["a", " 0"]], "target": "0"}': "number of one continuation and",
    json.dumps(BLANK | {"target": "5"}): "which is 2 of its 2 continuations: make the file by",
    '{"arguments": [["a", "b"], ["a", "c"]], "target": "d"}': "which is 0 of its 2",
    '{"context": "a", "continuations": ["\\ud800", "c"], "answer": 0}': "half of a character",
    "[1]": "has no key 'continuations'",
    "{": "is not JSON",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_row_is_a_sentence_with_its_line(line, tmp_path):
    right = json.dumps(ROWS["number"][0])
    path = tmp_path / "t.jsonl"
    path.write_text(f"{right}\n{line}\n")
    with pytest.raises(UserError) as found:
        tasks.read_rows(TaskFile("t", str(path), None))
    assert str(found.value).startswith(f"{path}:2 ")
    assert WRONG[line] in str(found.value)


def test_numbers_of_rows_and_missing_files(tmp_path):
    path = tmp_path / "samples_arc_easy_2026-01-31T12-00-00.123.jsonl"
    path.write_text(f"{json.dumps(ROWS['number'][0])}\n" * 3)
    [file] = parse_task_files((f"{path}:2",))
    assert (file.name, file.rows) == ("arc_easy", 2)
    assert len(tasks.read_rows(file)) == 2
    with pytest.raises(UserError, match=r"asks for 4 rows, .* has 3"):
        tasks.read_rows(TaskFile("t", str(path), 4))
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, sentence in (("empty.jsonl", "has no row"), ("no.jsonl", "No such file")):
        with pytest.raises(UserError, match=sentence):
            tasks.read_rows(TaskFile("t", str(tmp_path / name), None))


def test_without_a_tokenizer_texts_are_numbers(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [{"context": " 1 2", "continuations": ["3", " 4 5 "], "answer": 0}]
    rows.append({"context": "1 2", "continuations": ["3"], "answer": 0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = tasks.encode_tasks([TaskFile("t", str(path), None)], Text(None, 6), 3)
    assert found.requests == [([1, 2, 3], 2), ([1, 2, 4, 5], 2)], "equal requests are one"
    assert [row.requests for row in found.tasks[0].rows] == [(0, 1), (0,)]
    cut = tasks.encode_tasks([TaskFile("t", str(path), None)], Text(None, 6), 2)
    assert cut.requests == [([1, 2, 3], 2), ([2, 4, 5], 1)]
    assert "1 texts lose the beginning of their context, seq-length is 2" in cut.notes[0]
    for vocab, length, sentence in ((5, 3, "5 is not below"), (6, 1, "has 2 tokens: seq-length")):
        with pytest.raises(UserError, match=sentence):
            tasks.encode_tasks([TaskFile("t", str(path), None)], Text(None, vocab), length)
    path.write_text(json.dumps({"context": "", "continuations": ["3"], "answer": 0}))
    with pytest.raises(UserError, match="'' is no list of token ids"):
        tasks.encode_tasks([TaskFile("t", str(path), None)], Text(None, 6), 3)


def test_bits_are_divided_by_the_bytes_of_all_that_is_scored(tmp_path):
    """Also by the white space that ends the context, which is scored with the continuation."""
    path = tmp_path / "t.jsonl"
    texts = [("1 ", "é"), ("1 \n", "é"), ("1", " é"), (" ", "é"), ("1 ", "")]
    rows = [{"context": begin, "continuations": [end], "answer": 0} for begin, end in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Bytes:
        begin, end = (), 0

        def prompts(self, texts):
            return [list(text.encode()) for text in texts]

        def notes_on(self, texts, what):
            return []

    text = Text(None, 256)
    text.encoder = Bytes()
    found = tasks.encode_tasks([TaskFile("t", str(path), None)], text, 9)
    [task] = found.tasks
    scored = [found.requests[row.requests[0]] for row in task.rows]
    assert [len(request.ids) - request.start for request in scored] == [3, 4, 3, 3, 1]
    assert [row.bytes for row in task.rows] == [(3,), (4,), (3,), (3,), (1,)]
    assert [row.lengths for row in task.rows] == [(2,), (2,), (2,), (2,), (1,)]


@given(
    st.lists(st.integers(2, 17), max_size=60),
    st.sampled_from([1, 2, 6]),
    st.sampled_from([None, 4, 9]),
)
def test_every_request_is_in_one_sample_and_sees_only_itself(sizes, at_once, limit):
    draw = random.Random(3)
    requests = []
    for size in sizes:
        ids = [draw.randrange(1, 99) for _ in range(size)]
        requests.append(tasks.ScoringRequest(ids, draw.randint(1, size - 1)))
    packed = tasks.pack(requests, 16, at_once, limit)
    placed = [each for of_sample in packed.samples for each in of_sample]
    assert sorted(placed) == list(range(len(requests)))
    seen = dict.fromkeys(range(len(requests)), 0)
    for number, sample_requests in enumerate(packed.samples):
        arrays = packed.arrays(number)
        for each in sample_requests:
            ids, start = requests[each]
            is_own = (arrays["rows"] == each) & (arrays["labels"] >= 0)
            assert arrays["labels"][is_own].tolist() == ids[start:]
            first = int(np.flatnonzero(is_own)[0]) - (start - 1)
            own = slice(first, first + len(ids) - 1)
            assert arrays["tokens"][own].tolist() == ids[:-1]
            assert arrays["positions"][own].tolist() == list(range(len(ids) - 1))
            assert set(arrays["starts"][own]) == {first}
            assert arrays["stops"][own].tolist() == list(range(first + 1, own.stop + 1))
            seen[each] += 1
            is_short = limit is None or len(ids) - 1 <= limit
            assert (number < packed.short) == is_short
    assert set(seen.values()) <= {1}
    if limit is not None:
        assert packed.short % at_once == 0
    # A sample of all lengths that a smaller number of samples could not hold.
    used = sum(map(bool, packed.samples))
    full = -(-sum(size - 1 for size in sizes) // 16)
    assert used <= 2 * full + 1 + (limit is not None)


# ------------------------------------------------------------------------------------------------
# Results
# ------------------------------------------------------------------------------------------------


def test_results_are_those_of_the_formulas():
    rows = [
        tasks.TaskRow((0, 1), (1,), (2, 8), (3, 9)),
        tasks.TaskRow((2, 3, 4), (0, 2), (4, 1, 4), (4, 1, 4)),
        tasks.TaskRow((5,), (0,), (2,), (3,)),
        tasks.TaskRow((6,), (0,), (2,), (3,)),
    ]
    values = np.array([-3.0, -8.0, -2.0, -1.0, -4.0, -6.0, -7.0])
    misses = np.array([0, 0, 1, 1, 1, 0, 2.0])
    found = tasks.results(tasks.Task("t", rows), values, misses)
    # Rows 1 and 2 are wrong by the sums; over their bytes -8/8 is above -3/2, and -2/4 above -1/1.
    assert found.accuracy == 1 / 4
    assert found.normalised_accuracy == 3 / 4
    bits = (8 + 2 + 6 + 7) / math.log(2)
    assert found.bits_per_byte == pytest.approx(bits / (9 + 4 + 3 + 3), rel=1e-15)
    values[3] = math.nan
    assert all(map(math.isnan, tasks.results(tasks.Task("t", rows), values, misses)))


# Layouts on 4 ranks with what changes the masks, the positions or what a rank has of a text.
LAYOUTS = [
    {"tp": 2, "pp": 2, "sequence_parallel": True},
    {"pp": 2, "layers": 4, "schedule": "interleaved", "cp": 2, "positions": "rotary"},
    {"pp": 2, "layers": 4, "schedule": "zb-v", "tp": 2, "positions": "alibi"},
    {"cp": 4, "zero": 3, "qk_norm": "head"},
    {"pp": 4, "layers": 4, "schedule": "zb-h1", "micro_batch_size": 2},
    {"ep": 4, "experts": 4, "experts_per_token": 2, "bias": False, "positions": "rotary"},
    {"cp": 2, "tp": 2, "window": 5, "window_blocks": "1:1", "sinks": True},
    {"zero": 3, "tp": 2, "micro_batch_size": 4, "global_batch_size": 16, "positions": "rotary"}
    | {"rotary_scaling": "longrope:6:1.2:1,1.5:2,3"},
]


def test_scores_are_those_of_one_rank_in_every_layout(tmp_path):
    cases = [{"precision": "fp64", "init_std": 0.3} | case for case in LAYOUTS]
    alone = ("tp", "pp", "cp", "ep", "zero", "schedule", "sequence_parallel", "micro_batch_size")
    found = results_of("tests/task_worker.py", 4, cases, tmp_path)
    for case, result in zip(cases, found, strict=True):
        single = {name: value for name, value in case.items() if name not in alone}
        expected = task_worker.run_case(single, None)
        values = expected["log_likelihoods"]
        difference = relative_difference(result["log_likelihoods"], values, max(map(abs, values)))
        assert difference < 1e-14, case
        assert result["misses"] == expected["misses"], case
        assert result["repeats"]


# ------------------------------------------------------------------------------------------------
# Against transformers and lm_eval
# ------------------------------------------------------------------------------------------------


def imported(case: str, folder) -> tuple[object, str]:
    """transformers' model of a case of test_families.py, and a checkpoint with its weights."""
    theirs = their_model(case)
    theirs.save_pretrained(folder / "hf")
    hf_export.import_weights(str(folder / "hf"), str(folder / "in"))
    return theirs, str(folder / "in" / "step_00000000")


def scorer_of(checkpoint: str, found: tasks.TaskSet, **options) -> Scorer:
    """A Scorer of the model of a checkpoint on one rank."""
    words = {"model": checkpoint, "steps": 1, "device": "cpu", "precision": "fp32"} | options
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in words.items()]
    config = validation.check(parse(flags), 1)
    state = trainer.build_model(config)
    with Index(checkpoint) as index:
        load_weights(state.stages, index)
    return Scorer(state.pipeline, state.factory, config, found)


@pytest.mark.parametrize("case", FIXTURES)
def test_log_likelihoods_are_those_of_transformers(case, tmp_path):
    """Each text alone, without padding, in transformers."""
    theirs, checkpoint = imported(case, tmp_path)
    draw = random.Random(5)
    requests = []
    for _ in range(12):
        ids = [draw.randrange(V) for _ in range(draw.randint(2, S + 1))]
        requests.append(tasks.ScoringRequest(ids, draw.randint(1, len(ids) - 1)))
    scorer = scorer_of(checkpoint, tasks.TaskSet([], requests), micro_batch_size=2)
    log_likelihoods, misses = scorer.score()
    for (ids, start), value, missed in zip(requests, log_likelihoods, misses, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([ids[:-1]])).logits[0, start - 1 :, :V].double()
        labels = torch.tensor(ids[start:])
        expected = logits.log_softmax(-1).gather(-1, labels[:, None]).sum().item()
        assert value == pytest.approx(expected, abs=1e-4), (case, ids)
        assert missed == (logits.argmax(-1) != labels).sum()


@pytest.mark.parametrize("case", FIXTURES)
def test_log_likelihoods_and_accuracies_are_lm_evals(case, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    for file, found in lm_eval_cases.compare(case, tmp_path).items():
        assert found["requests"] == 80, file
        assert found["off"] <= 1e-4, file
        assert found["other_greedy"] == 0, file
        for ours, theirs in found["numbers"].values():
            assert ours == pytest.approx(theirs, abs=1e-6), file


def test_a_file_of_lm_eval_has_what_it_counts_as_right(tmp_path, monkeypatch):
    """Tasks whose choices are in the context, and those of one continuation."""
    pytest.importorskip("lm_eval")
    from scripts import eval_tasks

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "data.jsonl").write_text('{"q": "x _ z", "o": ["a", "b"], "right": 1}\n')
    common = "dataset_path: json\ntest_split: test\ndataset_kwargs: {data_files: {test: "
    common += f'"{tmp_path}/data.jsonl"}}, cache_dir: "{tmp_path}/c"}}\n'
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "f.py").write_text(
        "def text(doc): return doc['right']\n"
        "def target(doc): return 'z'\n"
        "def choice(doc): return ['x ' + o for o in doc['o']]\n"
    )
    blank = f"task: blank\noutput_type: multiple_choice\n{common}doc_to_text: !function f.text\n"
    blank += "doc_to_target: !function f.target\ndoc_to_choice: !function f.choice\n"
    (tmp_path / "tasks" / "blank.yaml").write_text(blank + "metric_list: [{metric: acc}]\n")
    last = f'task: last\noutput_type: loglikelihood\n{common}doc_to_text: "x"\n'
    last += 'doc_to_target: " z"\nmetric_list: [{metric: acc}]\n'
    (tmp_path / "tasks" / "last.yaml").write_text(last)
    words = ["--out", str(tmp_path / "out"), "--include-path", str(tmp_path / "tasks")]
    eval_tasks.main(["blank", "last", *words])
    rows = {
        name: json.loads((tmp_path / "out" / f"{name}.jsonl").read_text())
        for name in ("blank", "last")
    }
    assert rows["blank"] == {"context": ["x a", "x b"], "continuations": [" z"] * 2, "answer": 1}
    assert rows["last"] == {"context": "x", "continuations": [" z"], "answer": 0}
    with pytest.raises(UserError, match="lm_eval has no task 'blanc'; did you mean"):
        eval_tasks.main(["blanc", *words])


# ------------------------------------------------------------------------------------------------
# In a run
# ------------------------------------------------------------------------------------------------


def test_a_run_writes_rows_a_line_and_series(tmp_path):
    """With the average of weights, and a resume, which does not evaluate unless asked again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tmp_path / "sums.jsonl"
    rows = [
        {"context": f"{n} 7", "continuations": [f" {n + 1}", " 5 6 7"], "answer": n % 2}
        for n in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run"
    words = (
        "train.py --layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 61 --device cpu "
    )
    words += f"--global-batch-size 4 --no-watchdog --no-preflight --save-every 4 --out {out} "
    asked = f"--eval-tasks {path} half={path}:10 --eval-every 2 --ema 0.9 --eval-ema --tensorboard "
    done = fork_one(*f"{words} {asked} --steps 4".split())
    assert done.status == 0, done.err
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "task" in line]
    names = ["sums", "half", "sums_ema", "half_ema"]
    assert [(line["iteration"], line["task"]) for line in found] == [
        (step, name) for step in (2, 4) for name in names
    ]
    for line in found:
        assert 0 <= line["accuracy"] <= 1
        assert 0 <= line["normalised_accuracy"] <= 1
        assert line["bits_per_byte"] > 0
        assert line["consumed_tokens"] == line["iteration"] * 4 * 16
    text = f"step 4/4 | task sums | accuracy {found[4]['accuracy']:.4f} | normalised accuracy "
    assert text in done.out
    assert f"sums accuracy {found[4]['accuracy']:.4f}" in done.out.splitlines()[-3]
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    for name in names:
        for kind in ("accuracy", "normalised_accuracy", "bits_per_byte"):
            seen = {event.step: event.value for event in events.Scalars(f"tasks/{name}/{kind}")}
            expected = {line["iteration"]: line[kind] for line in found if line["task"] == name}
            assert seen == pytest.approx(expected, rel=1e-6)
    again = fork_one(*f"{words} --steps 6 --resume auto".split())
    assert again.status == 0, again.err
    assert "task" not in again.out
    path.write_text("{}\n")
    refused = fork_one(*f"{words} {asked} --steps 8 --resume auto".split())
    assert refused.status == 2
    assert f"error: {path}:1 has no key 'continuations'" in refused.err


def test_a_phase_of_shorter_samples_evaluates_texts_of_the_models_length(tmp_path):
    """Without a validation split, whose evaluation would set the length too."""
    phases = tmp_path / "phases.toml"
    phases.write_text(
        '[[phase]]\nfrom_tokens = 0\nname = "short"\nseq_length = 8\n'
        '[[phase]]\nfrom_tokens = 64\nname = "long"\n'
    )
    path = tmp_path / "t.jsonl"
    row = {"context": "1 2 3 4 5 6", "continuations": [" 9 8 7 6 5 4", " 3"], "answer": 0}
    path.write_text(json.dumps(row) + "\n")
    words = "train.py --layers 1 --hidden 32 --heads 4 --seq-length 16 --vocab-size 61 --steps 4 "
    words += (
        "--global-batch-size 4 --lr 0 --device cpu --no-watchdog --no-preflight --eval-every 1 "
    )
    out = tmp_path / "run"
    done = fork_one(*f"{words} --phases {phases} --eval-tasks {path} --out {out}".split())
    assert done.status == 0, done.err
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    bits = [line["bits_per_byte"] for line in lines if "task" in line]
    assert len(bits) == 4
    assert len(set(bits)) == 1, "the weights are the same"
