"""The page of `check.py --cluster`: what came of each part, as data and as text.

part = network_result(folder)        reads what a part has written
write(card, folder)              card.json, and card.md: a page for an issue
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from base.cli import VERSION
from base.errors import RunError, number_ranges
from costs import hardware, memory
from tools.numerics import against
from tools.planner import run_files

RIGHT = "as it should"
TITLES = {
    "network": "Network",
    "layouts": "Layouts against one rank",
    "straight": "A small run",
    "killed": "A rank is killed",
    "resumed": "Resumed in another layout",
    "known": "The known run",
    "model": "One model",
}
LOSS_TOLERANCE = 1e-3  # of fp32 losses after dozens of steps, where rounding grows
MOST_RANKS_SHOWN = 64


def launch_facts(context: Any, given: Any) -> dict[str, Any]:
    """Return what is known before the first part: launch, nodes and versions."""
    import torch

    about = {"version": VERSION, "date": time.strftime("%Y-%m-%d %H:%M"), "ranks": context.size}
    about |= {"launcher": context.launch.launcher, "nodes": len(set(context.nodes))}
    about |= {"torch": torch.__version__, "cuda": torch.version.cuda, "minutes": given.minutes}
    return {"about": about}


def network_result(folder: Path, device: str) -> dict[str, Any]:
    """Return the bandwidths; the part is as it should be if no pair is slow.

    On CPU ranks slow pairs are only named: other programs on the cores make a pair slow.
    """
    found = json.loads((folder / "network.json").read_text())
    part: dict[str, Any] = {"found": found}
    if found["slow"] and device == "cuda":
        part |= {"status": "slow links", "why": "; ".join(found["slow"][:4])}
    return part


def layouts_result(folder: Path) -> dict[str, Any]:
    """Return the layouts; the part is as it should be if all are equal to one rank."""
    lines = (folder / "layouts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    part: dict[str, Any] = {"found": rows}
    wrong = [row for row in rows if row["differs"]]
    if wrong:
        part |= {"status": "different", "why": f"{wrong[0]['layout']}: {wrong[0]['differs']}"}
    return part


def _losses(path: Path) -> dict[int, float]:
    """Return the loss of each step in a metrics.jsonl."""
    rows = run_files.rows_of(path)
    return {row["iteration"]: row["loss"] for row in rows if "grad_norm" in row}


def straight_result(folder: Path) -> dict[str, Any]:
    """Return the steps of the small run."""
    losses = _losses(folder / "straight" / "metrics.jsonl")
    return {"found": {"steps": max(losses), "last_loss": losses[max(losses)]}}


def killed_result(folder: Path, victim: int, statuses: list[int | None]) -> dict[str, Any]:
    """Return who was named; the part is as it should be if it is the victim, and all have ended."""
    if all(status == 0 for status in statuses):
        return {"status": "not killed", "why": "the run ended before its rank was killed"}
    steps = max(_losses(folder / "killed" / "metrics.jsonl"), default=0)
    case = json.loads((folder / "killed" / "hang" / "case.json").read_text())
    found = {
        "victim": victim,
        "kind": case.get("kind"),
        "named": case.get("culprits"),
        "step": steps,
    }
    part: dict[str, Any] = {"found": found}
    if found["named"] != [victim]:
        part |= {"status": "another is named", "why": f"ranks {found['named']}, not {victim}"}
    if any(status == 0 for status in statuses):
        part |= {"status": "not ended", "why": "some ranks ended with status 0"}
    return part


def resumed_result(folder: Path, layout: list[str]) -> dict[str, Any]:
    """Return the part of the page on the resumed run, compared with the run that was not killed.

    folder: has both runs. off: the largest difference of losses, as a share of the loss.
    """
    straight = _losses(folder / "straight" / "metrics.jsonl")
    resumed = _losses(folder / "killed" / "metrics.jsonl")
    off = max(abs(resumed[step] - straight[step]) / straight[step] for step in resumed)
    found = {"layout": " ".join(layout), "from": min(resumed), "to": max(resumed), "off": off}
    part: dict[str, Any] = {"found": found}
    if max(resumed) != max(straight):
        part |= {"status": "not finished", "why": f"step {max(resumed)} of {max(straight)}"}
    if not off <= LOSS_TOLERANCE:
        part |= {"status": "different", "why": f"losses are {off:.1e} off"}
    return part


def known_result(folder: Path, recipe: Path, failed: str | None) -> dict[str, Any]:
    """Return whether the run in a folder is that of a recipe. failed: why there is no corpus."""
    if failed:
        raise RunError(failed)
    found = against.compare(recipe, folder / "known")
    said = against.text(found)
    part: dict[str, Any] = {"found": {"verdict": found["verdict"], "text": said}}
    if found["verdict"] == "other":
        part |= {"status": "not the known run", "why": said.partition("\n")[2].strip()}
    return part


def model_result(folder: Path, gpu: str | None) -> dict[str, Any]:
    """Return speed and memory of the model, and the planner's numbers, if it knows the machine."""
    run = folder / "model"
    facts = run_files.facts_of(str(run))
    rows = [row for row in run_files.rows_of(run / "metrics.jsonl") if "grad_norm" in row][2:]
    middle = {
        name: statistics.median(row[name] for row in rows)
        for name in ("seconds", "tokens_per_second", "peak_memory_bytes")
    }
    mfu = [row["mfu"] for row in rows if row.get("mfu") is not None]
    found: dict[str, Any] = {**middle, "mfu": statistics.median(mfu) if mfu else None}
    cluster = facts["cluster"]
    found |= {"device": cluster["device"], "places": cluster["places"], "command": facts["command"]}
    found |= {"kernels": facts["kernels"], "commit": facts.get("commit")}
    log = (run / "log.txt").read_text().splitlines()
    found["notes"] = [line for line in log if line.startswith("note")]
    said = (folder / "logs" / "model-0.txt").read_text(errors="replace").splitlines()
    found["notes"] += [line for line in said if line.startswith("note") and line not in log]
    kind = cluster["places"][0]["device"].partition(":")[0]
    machine = hardware.load(gpu or "cpu") if gpu or kind == "cpu" else None
    machine = machine or hardware.machine_with_device(cluster["device"])
    if machine is None:
        found["planned"] = None
        return {"found": found}
    config = run_files.config_of(str(run))
    from costs.job import Job
    from costs.step_time import predict

    job = Job(config.model, config.layout, config.training, machine)
    planned = {"machine": machine.name, "seconds": predict(job).seconds}
    planned["memory_bytes"] = memory.fullest(job).total
    found["planned"] = planned
    return {"found": found}


# ---- The page ------------------------------------------------------------------------------------


def write(card: dict[str, Any], folder: Path) -> None:
    """Write card.json and card.md, each at once, so that none is ever half written."""
    texts = {"card.json": json.dumps(card, indent=1), "card.md": "\n".join(page(card))}
    for name, text in texts.items():
        draft = folder / f"{name}.draft"
        draft.write_text(text + "\n")
        draft.replace(folder / name)


def verdict(card: dict[str, Any]) -> str:
    """Return in a sentence whether every part is as it should be."""
    wrong = {name: part for name, part in card["parts"].items() if part["status"] != RIGHT}
    if not wrong:
        return f"{len(card['parts'])} of {len(card['parts'])} parts are as they should be"
    said = [f"{name}: {part['status']} ({part.get('why', '')})" for name, part in wrong.items()]
    return "; ".join(said)


def page(card: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of card.md."""
    about, parts = card["about"], card["parts"]
    model = parts.get("model", {}).get("found", {})
    device = model.get("device", "device not known yet")
    where = "one node" if about["nodes"] == 1 else f"{about['nodes']} nodes"
    yield f"# Trine {about['version']} on {about['ranks']} ranks of {where}: {device}"
    yield ""
    yield verdict(card) + "."
    yield ""
    commit = f", commit {model['commit']}" if model.get("commit") else ""
    cuda = f", CUDA {about['cuda']}" if about["cuda"] else ""
    yield f"{about['date']}, by {about['launcher']}, torch {about['torch']}{cuda}{commit}."
    yield ""
    yield "| part | outcome | seconds |"
    yield "| --- | --- | --: |"
    for name, part in parts.items():
        why = f": {part['why']}" if "why" in part else ""
        yield f"| {TITLES[name]} | {part['status']}{why} | {part['seconds']:.0f} |"
    writers: dict[str, Callable[[Any], Iterator[str]]]
    writers = {"network": _network, "layouts": _layouts, "killed": _killed}
    writers |= {"resumed": _resumed, "known": _known, "model": _model}
    for name, lines in writers.items():
        if "found" in parts.get(name, {}):
            yield ""
            yield f"## {TITLES[name]}"
            yield ""
            yield from lines(parts[name]["found"])


def _network(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of card.md on bandwidths: a table of collectives, and the slow pairs.

    found: the result of the part network.
    """
    rate = found["line_rate"]
    known = f"{rate['bits_per_second'] / 1e9:g} Gbit/s ({rate['source']})" if rate else "not known"
    yield f"Line rate of a node: {known}. busbw is the rate of one link in one direction."
    yield ""
    yield "| group | ranks | between nodes | operation | bytes | GB/s | Gbit/s | of the line |"
    yield "| --- | --: | --- | --- | --: | --: | --: | --: |"
    for row in found["rows"]:
        group = f"{row['group']} x {row['groups']}" if row["together"] else row["group"]
        crosses = "yes" if row["crosses"] else "no"
        of_line = row["percent_of_line"]
        share = of_line if of_line == "-" else f"{float(of_line):.0f} %"
        yield (
            f"| {group} | {row['ranks']} | {crosses} | {row['operation']} | {row['bytes']:,} | "
            f"{float(row['busbw_GBps']):.3g} | {float(row['busbw_Gbps']):.3g} | {share} |"
        )
    if found["pairs"]:
        rates = [rate for _, _, rate in found["pairs"]]
        slowest = min(found["pairs"], key=lambda pair: pair[2])
        yield ""
        yield (
            f"{len(rates)} pairs: median {statistics.median(rates) / 1e9:.3g} GB/s, slowest "
            f"{slowest[0]} to {slowest[1]} with {slowest[2] / 1e9:.3g}."
        )
    yield from (f"* {sentence}" for sentence in found["slow"])


def _layouts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each layout."""
    yield "Every tensor of a small GPT in fp64, three steps. Where one differs, logs/layouts-0.txt"
    yield "has the operations before it."
    yield ""
    for row in rows:
        off = f", losses {row['off']:.1e} off" if row["off"] is not None else ""
        yield f"* {row['layout']}: {row['differs'] or 'equal'}{off}"


def _killed(found: dict[str, Any]) -> Iterator[str]:
    """Yield who was killed and who was named."""
    named = number_ranges(found["named"] or [])
    yield (
        f"Rank {found['victim']} was killed after step {found['step']}; the report names rank "
        f"{named} ({found['kind']})."
    )


def _resumed(found: dict[str, Any]) -> Iterator[str]:
    """Yield how the run went on."""
    yield (
        f"Steps {found['from']} to {found['to']} with {found['layout']}: losses at most "
        f"{found['off']:.1e} from those of the run that was not killed."
    )


def _known(found: dict[str, Any]) -> Iterator[str]:
    """Yield what `runs.py against` says."""
    yield "recipes/dense-1m, seed 1, in fp32 with --tp 2:"
    yield ""
    yield from (f"    {line}" for line in found["text"].splitlines())


def _model(found: dict[str, Any]) -> Iterator[str]:
    """Yield speed and memory beside the planner's, and where the ranks were."""
    yield f"    {' '.join(found['command'])}"
    yield ""
    planned = found["planned"] or {}
    on = f"planned on {planned['machine']}" if planned else "the planner does not know the machine"
    yield f"| | measured | {on} |"
    yield "| --- | --: | --: |"
    seconds = f"{planned['seconds']:.4g}" if planned else ""
    held = f"{planned['memory_bytes'] / 1e9:.3g}" if planned else ""
    yield f"| seconds of a step | {found['seconds']:.4g} | {seconds} |"
    speed = found["tokens_per_second"]
    rate = f"{speed * found['seconds'] / planned['seconds']:,.0f}" if planned else ""
    yield f"| tokens/s | {speed:,.0f} | {rate} |"
    if found["mfu"] is not None:
        mfu = f"{found['mfu'] * found['seconds'] / planned['seconds']:.1%}" if planned else ""
        yield f"| MFU | {found['mfu']:.1%} | {mfu} |"
    yield f"| GB on the fullest rank | {found['peak_memory_bytes'] / 1e9:.3g} | {held} |"
    yield ""
    yield f"Kernels: {', '.join(f'{name} {value}' for name, value in found['kernels'].items())}."
    yield ""
    yield "| rank | node | device | cores | cores near the GPU |"
    yield "| --: | --- | --- | --- | --- |"
    for rank, place in enumerate(found["places"][:MOST_RANKS_SHOWN]):
        cores = number_ranges(place["cores"])
        near = place.get("near_gpu") or "-"
        yield f"| {rank} | {place['node']} | {place['device']} | {cores} | {near} |"
    more = len(found["places"]) - MOST_RANKS_SHOWN
    if more > 0:
        yield f"| {more} more | | | | |"
    for note in found["notes"]:
        yield ""
        yield note
