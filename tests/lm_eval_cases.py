"""Compares scores of tasks with lm_eval's on the exported model, for test_tasks.py and a benchmark.

Needs lm_eval (requirements-lm-eval.txt). Nothing is downloaded: models are random, and the task and
the tokenizer are made here.
"""

import json
import math
import random
from pathlib import Path

from ranks import fork_one
from test_families import their_model

from checkpointing import hf_export

FIXTURES = ("gpt2", "bloom", "llama 3", "mistral window", "gemma2", "phi3 long", "olmoe")
FIXTURES += ("deepseek_v2",)
S = 40  # the length of test_families' models


def compare(case: str, folder: Path) -> dict[str, dict]:
    """Trine's scores of a case of test_families.py beside lm_eval's of the exported model.

    The task is read from the file that scripts/eval_tasks.py makes, and from the samples that
    lm_eval logs. For each: `off`, the largest difference of a log-likelihood; `requests`, their
    number; `other_greedy`, how many differ in whether the continuation is the likeliest; `numbers`,
    by name (ours, lm_eval's). The begin token is there for every second family.
    """
    import lm_eval
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    from scripts import eval_tasks

    begins = FIXTURES.index(case) % 2 == 0
    checkpoint = with_tokenizer(case, folder, begins)
    write_task(folder)
    own = ["--include-path", str(folder / "tasks")]
    eval_tasks.main(["mine", "--out", str(folder / "files"), *own])
    hf_export.export_weights(checkpoint, str(folder / "out"), "fp32", family=case.split()[0])
    tracker = EvaluationTracker(output_path=str(folder / "log"))
    tracker.date_id = "2026-01-31T12-00-00.123456"
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={folder}/out,add_bos_token={begins},dtype=float32,max_length={S}",
        tasks=["mine"],
        task_manager=TaskManager(include_path=str(folder / "tasks")),
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
        evaluation_tracker=tracker,
    )
    samples = sorted(found["samples"]["mine"], key=lambda row: row["doc_id"])
    tracker.save_results_samples("mine", samples)
    [logged] = (folder / "log").rglob("samples_mine_*.jsonl")
    files = {"eval_tasks.py": folder / "files" / "mine.jsonl", "samples of lm_eval": logged}
    return {
        name: compare_scores(checkpoint, file, samples, found["results"]["mine"])
        for name, file in files.items()
    }


def compare_scores(checkpoint: str, file: Path, samples: list[dict], numbers: dict) -> dict:
    """The scores of a file of a task beside the samples and the results of lm_eval."""
    scores = file.with_name("scores.jsonl")
    words = ["--eval-tasks", str(file), "--scores", str(scores), "--device", "cpu"]
    done = fork_one("sample.py", checkpoint, *words)
    if done.status:
        raise RuntimeError(done.err)
    rows = [json.loads(line) for line in scores.read_text().splitlines()]
    off, other_greedy, requests = 0.0, 0, 0
    for row, theirs in zip(rows, samples, strict=True):
        triples = zip(row["log_likelihoods"], row["greedy"], theirs["filtered_resps"], strict=True)
        for ours, greedy, (value, their_greedy) in triples:
            difference = abs(ours - float(value))
            off = max(off, difference) if math.isfinite(difference) else math.inf
            other_greedy += greedy != (their_greedy in (True, "True"))
            requests += 1
    line = next(line for line in done.out.splitlines() if line.startswith("mine: accuracy"))
    words = line.replace(",", "").split()
    return {
        "off": off,
        "requests": requests,
        "other_greedy": other_greedy,
        "numbers": {
            "accuracy": (float(words[2]), numbers["acc,none"]),
            "normalised accuracy": (float(words[5]), numbers["acc_bytes,none"]),
        },
    }


def write_task(folder: Path) -> None:
    """A task of lm_eval with texts as found anywhere, and its definition."""
    draw = random.Random(11)
    words = ["the", "a", "of", "Ünïcode", "über", "北京", "x1", "(yes)", "no!", "3.14", "end\nline"]

    def some(most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

    lines = []
    for number in range(20):
        choices = [some(5) for _ in range(4)]
        question = some(6) + (" " if number % 3 == 0 else "")
        lines.append({"question": question, "choices": choices, "gold": number % 4})
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = [
        "task: mine",
        "dataset_path: json",
        f'dataset_kwargs: {{data_files: {{test: "{folder}/data.jsonl"}}, cache_dir: "{folder}/c"}}',
        "output_type: multiple_choice",
        "test_split: test",
        'doc_to_text: "{{question}}"',
        'doc_to_choice: "choices"',
        'doc_to_target: "gold"',
        "metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]",
    ]
    (folder / "tasks").mkdir()
    (folder / "tasks" / "mine.yaml").write_text("\n".join(task) + "\n")


def with_tokenizer(case: str, folder: Path, begins: bool) -> str:
    """A checkpoint of a case's model with random weights and a tokenizer, imported from files.

    begins: whether the tokenizer puts a token before each text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer_of_tokens = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
    )
    made.train_from_iterator(["the answer is no a of the yes then "] * 20, trainer_of_tokens)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    if begins:
        settings["bos_token"] = "<s>"
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    theirs = their_model(case, vocab=made.get_vocab_size())
    theirs.save_pretrained(folder / "hf")
    made.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    hf_export.import_weights(str(folder / "hf"), str(folder / "in"))
    return str(folder / "in" / "step_00000000")
