"""Derives the name that `runs.py diff` must give a planted fault: rule of planted_faults.md.

`expected` follows from the call sites at which the fault changed a bit, and from the model alone;
`judged` compares it with what diff found.
"""

import re
from itertools import accumulate
from typing import Any

import planted_by_hand
from planted_by_hand import GRADIENT

from telemetry.numerics_trace import activation_names

METRIC = "metric"  # the row of metrics.jsonl alone, and what follows from it in the update
Named = tuple[str, str, str, int]  # kind, name, operation, steps until a trace can show it


def expected(row: dict[str, Any]) -> dict[str, Any]:
    """The step, the tensor (kind and name) and the operation that diff must name."""
    first = min(hit["step"] for hit in row["hits"])
    hits = [hit for hit in row["hits"] if hit["step"] == first]
    by_hand = row["plant"].get("by_hand")
    if by_hand:
        fault = planted_by_hand.FAULTS[by_hand]
        ((kind, name),) = fault.rows
        if not name:
            noted = [each for hit in hits for each in hit["detail"].split(",")]
            name = min(noted, key=row["parameters"].index)
        named: Named = (kind, name, fault.operation, fault.later)
    else:
        named = min((_named(hit, row) for hit in hits), key=lambda each: _place(each, row))
    kind, name, operation, later = named
    return {"step": first + later, "kind": kind, "name": name, "operation": operation}


def _place(named: Named, row: dict[str, Any]) -> tuple[int, int]:
    kind, name, *_ = named
    if kind == "activation":
        return 0, activation_names(sum(row["blocks"])).index(name)
    return 1, 0 if kind == METRIC else row["parameters"].index(name)


def _named(hit: dict[str, Any], row: dict[str, Any]) -> Named:
    """Return the outcome that one altered call must have."""
    site, detail = hit["site"], hit["detail"]
    innermost = site.split(" < ")[0].split(" ", 1)[1]
    block = re.search(r"blocks\.(\d+)", detail)
    number = int(block[1]) if block else 0
    if innermost.startswith(("Bucket", "ParamGroup")):
        return _of_bucket(innermost, hit, row)
    if "Optimizer.step" in site:
        return METRIC, "", "sum over all ranks", 0
    if "vocabulary.py" in site and "_Linear" not in site and "VocabEmbedding" not in site:
        return _of_vocabulary(hit)
    if "_post_receive" in site:
        return _of_message(detail, row["blocks"])
    if "backward" in site or "Deferred" in site:
        return _of_backward(site, hit, row, number if block else None)
    if "VocabEmbedding" in site:
        return "activation", "embedding", "reduction over tp", 0
    if "_CrossEntropy" in site:
        return "activation", "loss", "sums over tp", 0
    if "Head.logits" in site:
        return "activation", "loss", "output matrix", 0
    if "context_parallel" in site:
        return "activation", f"blocks.{number}.attention", "exchange over cp", 0
    if "token_exchange" in site:
        return "activation", f"blocks.{number}", "exchange over ep", 0
    attention = "Attention.forward" in site
    name = f"blocks.{number}.attention" if attention else f"blocks.{number}"
    if "_Linear.forward" in site:
        return "activation", name, "q k v matrix" if attention else "MLP up", 0
    if "ExpertMLP" in site:
        return "activation", name, "reduction over tp", 0
    return "activation", name, f"{'output matrix' if attention else 'MLP down'} and its reduc", 0


def _of_bucket(innermost: str, hit: dict[str, Any], row: dict[str, Any]) -> Named:
    names = hit["detail"].split(",")
    if "all_gather_params" in innermost:
        order = activation_names(sum(row["blocks"]))
        first = min(map(_user, names), key=order.index)
        return "activation", first, "ZeRO's all-gather", 1
    first = min(names, key=row["parameters"].index)
    operation = "reduction over dp and cp"
    if "reduce_further" in innermost:
        operation = "both ends of the pipeline" if hit["role"] == "tied" else "over tp where"
    return GRADIENT, first, operation, 0


def _user(parameter: str) -> str:
    """The first output that is computed with a parameter."""
    part, number, *inner = [*parameter.split("."), "", ""]
    if part == "blocks":
        in_attention = inner[0].startswith("attention")
        return f"blocks.{number}.attention" if in_attention else f"blocks.{number}"
    if part == "embedding":
        return "embedding"
    return "head.norm" if number == "norm" else "loss"


def _of_vocabulary(hit: dict[str, Any]) -> Named:
    kind = hit["role"].removeprefix("pass ")
    if kind == "E":
        return "activation", "embedding", "reduction over", 0
    if kind == "G":
        return GRADIENT, planted_by_hand.TOKENS, "broadcast", 0
    operation = {"S": "broadcast", "T": "reduction over"}.get(kind, "cross-entropy")
    return "activation", "gradient of head.norm", operation, 0


def _of_message(detail: str, blocks: list[int]) -> Named:
    """Return the outcome of a wrong message into a stage; detail: F or B, and the stage."""
    stage = int(detail[1:])
    starts = [0, *accumulate(blocks)]
    operation = "message between stages"
    if detail[0] == "F":
        empty = starts[stage] == starts[-1]
        name = "head.norm" if empty else f"blocks.{starts[stage]}.attention"
        return "activation", name, operation, 0
    last = starts[stage + 1] - 1
    name = f"blocks.{last}" if last >= 0 else "embedding"
    return "activation", f"gradient of {name}", operation, 0


def _of_backward(site: str, hit: dict[str, Any], row: dict[str, Any], number: int | None) -> Named:
    layers = sum(row["blocks"])
    before_last = f"gradient of blocks.{layers - 2}"
    in_last = f"gradient of blocks.{layers - 1}.attention"
    if "context_parallel" in site:
        return "activation", before_last, "exchange over cp", 0
    if "token_exchange" in site:
        operation = "reduction over tp" if "OwnTokens" in site else "exchange over ep"
        return "activation", in_last, operation, 0
    if "_ReduceScatterSequence" in site:
        return "activation", in_last, "down", 0
    if hit["method"] == "all_gather":
        return GRADIENT, hit["detail"], "this layer's input", 0
    if number is None and "vocab" in row["layout"] and "VocabularyEnds" not in site:
        return "activation", in_last, "up and its reduc", 0  # the output matrix has its own passes
    if number is None:
        return "activation", "gradient of head.norm", "reduction over tp", 0
    if ".mlp." in hit["detail"]:
        return "activation", f"gradient of blocks.{number}.attention", "up and its reduc", 0
    if number == 0:
        return "activation", "gradient of embedding", "reduction over tp", 0
    return "activation", f"gradient of blocks.{number - 1}", "q k v matrix and its reduc", 0


def judged(row: dict[str, Any]) -> dict[str, bool]:
    """Whether step, tensor and culprit are right."""
    wanted, tensor, losses = row["expected"], row["tensor"], row["losses"]
    steps = [found["step"] for found in (tensor, losses) if found]
    right = bool(steps) and min(steps) == wanted["step"]
    if wanted["kind"] == METRIC:
        states = (GRADIENT, "activation", "weights before")
        fits = right and (tensor is None or tensor["kind"] not in states)
        return {"step": right, "tensor": fits, "culprit": wanted["operation"] in row["text"]}
    fits = tensor is not None and (tensor["kind"], tensor["name"]) == (
        wanted["kind"],
        wanted["name"],
    )
    culprit = fits and wanted["operation"] in tensor["between"]
    return {"step": right, "tensor": fits, "culprit": culprit}
