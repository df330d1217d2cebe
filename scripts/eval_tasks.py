"""Write tasks of lm-evaluation-harness as files for `train.py --eval-tasks`.

    python scripts/eval_tasks.py --out data/tasks arc_easy hellaswag --limit 1000
    python train.py ... --eval-tasks data/tasks/arc_easy.jsonl data/tasks/hellaswag.jsonl

lm_eval makes the prompts, with the data that it downloads or that is in its cache; the run then
needs no network. FOLDER/TASK.jsonl gets a row for each document: its contexts and continuations,
and which of them lm_eval counts as right. A group such as mmlu gives a file for each of its tasks.
Tasks that generate text, and whole texts for a perplexity, are refused. The Python must have the
packages of requirements-lm-eval.txt.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from base import errors  # first: it ends a Python that is too old

if __name__ == "__main__":
    errors.begin_program()

with errors.installed():
    from base.cli import Parser
    from base.errors import CorpusError
    from base.paths import check_folder, write_file
    from scripts.corpus import run

FEWSHOT_SEED = 1234  # the seed of lm_eval's own program for the examples in prompts
WRONG = -1e9  # a log-likelihood that is larger than no other


def load_tasks(names: list[str], include: str | None, shots: int | None) -> dict[str, Any]:
    """Return lm_eval's tasks by name, prepared as its own program does it; UserError.

    include: a folder with further tasks. shots: the examples in a prompt; None: as the task says.
    """
    with errors.installed("pip install -r requirements-lm-eval.txt -c constraints.txt"):
        from lm_eval.tasks import TaskManager
    manager = TaskManager(include_path=include)
    known = {*manager.all_tasks}
    for name in names:
        if name not in known:
            raise CorpusError(f"lm_eval has no task {name!r}{errors.nearest(name, known)}")
    tasks = manager.load(names)["tasks"]
    for task in tasks.values():
        default = task.get_config("num_fewshot")
        if shots is not None and default != 0:
            task.set_config(key="num_fewshot", value=shots)
        elif default is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return tasks


def rows_of(name: str, task: Any, limit: int | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each document of a task of lm_eval; UserError for a task of another kind."""
    kind = task.OUTPUT_TYPE
    if kind not in ("multiple_choice", "loglikelihood"):
        raise CorpusError(f"{name} is a task of {kind}, and not of choices between continuations")
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    by_document: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_document.setdefault(instance.doc_id, []).append(instance)
    for instances in by_document.values():
        instances.sort(key=lambda instance: instance.idx)
        pairs = [instance.args for instance in instances]
        answers = [0]
        if kind == "multiple_choice":
            answers = _answers(task, instances[0].doc, len(pairs))
            pairs = pairs[: len(task.doc_to_choice(instances[0].doc))]
        contexts = [context for context, *_ in pairs]
        yield {
            "context": contexts[0] if len(set(contexts)) == 1 else contexts,
            "continuations": [continuation for _, continuation, *_ in pairs],
            "answer": answers[0] if len(answers) == 1 else answers,
        }


def _answers(task: Any, document: Any, count: int) -> list[int]:
    """Return the numbers of the choices that lm_eval counts as right.

    It is asked by results in which each choice in turn has the largest log-likelihood, since tasks
    say in several ways what is right. count: the log-likelihoods that it takes.
    """
    right = []
    for number in range(len(task.doc_to_choice(document))):
        found = [(0.0 if n == number else WRONG, False) for n in range(count)]
        accuracy = task.process_results(document, found).get("acc")
        if accuracy is None:
            raise CorpusError(f"{task.config.task} has no accuracy among its metrics")
        if accuracy == 1.0:
            right.append(number)
    if not right:
        raise CorpusError(f"{task.config.task} has a document of which no continuation is right")
    return right


def main(arguments: list[str]) -> None:
    """Write a file for each task; raises UserError."""
    parser = Parser.described(__doc__)
    add = parser.add_argument
    add("tasks", nargs="+", metavar="TASK", help="tasks, groups or tags of lm_eval")
    add("--out", required=True, metavar="FOLDER", help="write FOLDER/TASK.jsonl")
    add("--limit", type=int, metavar="N", help="the first N documents of each task (all)")
    add("--num-fewshot", type=int, metavar="N", help="examples in a prompt (as the task says)")
    add("--include-path", metavar="FOLDER", help="further tasks of lm_eval, as YAML files")
    options = parser.parse_args(arguments)
    for flag, value in (("limit", options.limit), ("num-fewshot", options.num_fewshot)):
        if value is not None and value < (flag == "limit"):
            raise CorpusError(f"--{flag} must be at least {int(flag == 'limit')}, not {value}")
    check_folder("--out", options.out)
    tasks = load_tasks(options.tasks, options.include_path, options.num_fewshot)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    for name, task in tasks.items():
        rows = [json.dumps(row, ensure_ascii=False) for row in rows_of(name, task, options.limit)]
        path = Path(options.out, re.sub(r"[^A-Za-z0-9_-]", "_", name) + ".jsonl")
        write_file(str(path), "".join(f"{row}\n" for row in rows))
        print(f"{path}: {len(rows):,} rows")


if __name__ == "__main__":
    run(main)
