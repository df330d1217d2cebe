"""The loss of merged checkpoints of a stable run beside runs whose rate falls; with a picture.

    python benchmarks/training/merges.py --folder FOLDER

A GPT of 10M parameters trains on Python's library, less every tenth file, with a constant rate. On
the way a branch lets the rate fall, and at five moments the last checkpoints of the stable run are
merged, which trains nothing. The loss of each is that of the same samples of the files that
were left out. Runs and checkpoints are kept in FOLDER, so that the program goes on after a stop; a
folder that has them all is only reported. Writes benchmarks/results/merges.md and
docs/pictures/merges.svg.
"""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from matplotlib import rc_context
from matplotlib.figure import Figure

import data
import trainer
from base.cli import Parser
from benchmarks.results_file import head
from checkpoint import run_command
from checkpointing.folders import find_checkpoints
from checkpointing.index import Index
from checkpointing.load import load_weights
from config import validation
from config.command_line import parse
from tools.report.picture import LIGHT, SETTINGS, themed

RESULTS = ROOT / "benchmarks" / "results" / "merges.md"
PICTURE = ROOT / "docs" / "pictures" / "merges.svg"
LAYERS, HIDDEN, VOCAB, LENGTH, BATCH = 5, 384, 4096, 64, 8
STEPS, SAVE_EVERY, EVERY = 300, 10, 10
BRANCHES = {200: 100}  # the step where one begins, and its steps
MERGED = (100, 150, 200, 250, 300)
RULES = {"equal, 4": ("equal", 4), "equal, 8": ("equal", 8), "1-sqrt, 8": ("1-sqrt", 8)}
HELD_OUT = 64  # samples
SKIPPED = ("test", "tests", "idlelib", "site-packages", "lib2to3", "turtledemo")
RATE = 2e-3


def command(*words: object) -> str:
    """The output of a program of this repository; RuntimeError if it ends with another status."""
    line = [sys.executable, *map(str, words)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def prepare(folder: Path) -> None:
    """Make two corpora with one tokenizer: `train`, and `held`, which has every tenth file."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(library.rglob("*.py")) if not {*path.parts} & {*SKIPPED}]
    held = files[::10]
    train = [path for path in files if path not in set(held)]
    words = ["scripts/prepare_data.py", "--vocab-size", VOCAB, "--out"]
    command(*words, folder / "train", *train)
    words = ["scripts/prepare_data.py", "--tokenizer", folder / "train.tokenizer.json", "--out"]
    command(*words, folder / "held", *held)


def train(folder: Path, out: Path, *options: object) -> None:
    """Train a run to its end, or go on with it; nothing if it has ended."""
    if (out / "ended").exists():
        return
    evaluated = ["--eval-data", held_out(folder), "--eval-every", EVERY]
    command("train.py", *options, *evaluated, "--save-every", SAVE_EVERY, "--out", out)
    (out / "ended").touch()


def losses_of(out: Path) -> dict[int, float]:
    """The losses on the held-out samples, by step."""
    found = {}
    for path in [*sorted(out.glob("metrics.jsonl.*")), out / "metrics.jsonl"]:
        for row in map(json.loads, path.read_text().splitlines()):
            if "held_loss" in row:
                found[row["iteration"]] = row["held_loss"]
    return found


def merged_losses(folder: Path, shape: list[object]) -> dict[str, dict[int, float]]:
    """The losses of the merged last checkpoints of the stable run, by rule and step.

    shape: the options of the stable run.
    """
    words = [*shape, "--eval-data", held_out(folder)]
    config = validation.check(parse(list(map(str, words))), 1)
    splits = data.build(config)
    state = trainer.build_model(config)
    found: dict[str, dict[int, float]] = {}
    for rule, (weights, count) in RULES.items():
        for step in MERGED:
            steps = [step - SAVE_EVERY * back for back in range(count)][::-1]
            checkpoints = [f"{folder}/stable/checkpoints/step_{s:08d}" for s in steps]
            out = folder / f"merged-{step}-{weights}-{count}"
            if not out.exists():
                run_command(["merge", "--weights", weights, *checkpoints, str(out)])
            with Index(find_checkpoints(str(out))[0]) as index:
                load_weights(state.stages, index)
            loss = trainer.evaluate(state, *splits.eval_sets["held"])
            found.setdefault(rule, {})[step] = loss
    state.reader.close()
    return found


def held_out(folder: Path) -> str:
    """The word of --eval-data."""
    return f"held={folder}/held:{HELD_OUT}"


def measure(folder: Path) -> dict:
    """Train what is not there yet, and return all losses."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "held.idx").exists():
        prepare(folder)
    stable = folder / "stable"
    shape = ["--layers", LAYERS, "--hidden", HIDDEN, "--heads", 6, "--seq-length", LENGTH]
    shape += ["--vocab-size", VOCAB, "--positions", "rotary", "--global-batch-size", BATCH]
    shape += ["--lr", RATE, "--lr-schedule", "constant", "--lr-warmup-samples", 40 * BATCH]
    shape += ["--data", folder / "train", "--split", "100,0,0", "--order", "stable"]
    shape += ["--steps", STEPS, "--device", "cpu", "--micro-batch-size", BATCH]
    train(folder, stable, *shape, "--resume", "auto")
    found: dict = {"stable": losses_of(stable), "branches": {}, "merged": {}}
    found["parameters"] = json.loads((stable / "run.json").read_text())["parameters"]
    for step, steps in BRANCHES.items():
        out = folder / f"decay-{step}"
        checkpoint = stable / "checkpoints" / f"step_{step:08d}"
        words = ["--branch-from", checkpoint, "--decay-tokens", steps * BATCH * LENGTH]
        train(folder, out, *words)
        found["branches"][step] = losses_of(out)
    found["merged"] = merged_losses(folder, shape)
    return found


def draw(found: dict) -> str:
    """The losses by tokens, as an SVG."""
    with rc_context(SETTINGS):
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(*points(found["stable"]), color=LIGHT["mark"], label="stable run")
        for step, losses in found["branches"].items():
            name = "rate falls" if step == min(found["branches"]) else None
            joined = {step: found["stable"][step], **losses}
            axes.plot(*points(joined), color=LIGHT["good"], label=name)
        colors = dict(zip(RULES, ("orange", "red", "violet"), strict=True))
        for (rule, losses), marker in zip(found["merged"].items(), "o^s", strict=True):
            places = points(losses)
            axes.plot(
                *places, marker, color=LIGHT[colors[rule]], markersize=4, label=f"merged, {rule}"
            )
        axes.set(xlabel="tokens, thousands", ylabel="loss on files that were left out")
        shown = [loss for step, loss in found["stable"].items() if step >= MERGED[0]]
        ends = [min(losses.values()) for losses in found["branches"].values()]
        axes.set_ylim(min(ends) - 0.1, max(shown) + 0.1)
        axes.legend(frameon=False, labelcolor=LIGHT["ink"])
        return themed(figure)


def points(losses: dict[int, float]) -> tuple[Sequence[float], Sequence[float]]:
    """Thousands of tokens, and losses."""
    steps = sorted(losses)
    return [step * BATCH * LENGTH / 1e3 for step in steps], [losses[step] for step in steps]


def report(found: dict) -> str:
    """The text of the results file."""
    tokens = BATCH * LENGTH
    size = found["parameters"] / 1e6
    facts = f"{size:.1f}M parameters, fp32, one thread."
    command = "python benchmarks/training/merges.py --folder FOLDER"
    lines = head("Merged checkpoints of a stable run beside runs whose rate falls", command, facts)
    lines += [
        f"A GPT of {LAYERS} blocks of {HIDDEN}, vocabulary {VOCAB:,}, AdamW, {BATCH} samples of",
        f"{LENGTH} tokens a step, a rate of {RATE:g}, constant after {40 * tokens:,} tokens.",
        f"A branch's rate falls in a line over {min(BRANCHES.values())} steps to a tenth. Every",
        f"{SAVE_EVERY} steps a checkpoint is saved; `equal, 4` is the mean of the last four. Loss:",
        f"of {HELD_OUT} samples of files that were left out.",
        "",
        f"| step | tokens | stable | {' | '.join(RULES)} | rate fell |",
        "| --: | --: | --: |" + " --: |" * (len(RULES) + 1),
    ]
    fell = {step: losses[step] for losses in found["branches"].values() for step in [max(losses)]}
    for step in MERGED:
        cells = [str(step), f"{step * tokens:,}", f"{found['stable'][step]:.4f}"]
        cells += [f"{found['merged'][rule][step]:.4f}" for rule in RULES]
        cells.append(f"{fell[step]:.4f}" if step in fell else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the results and the picture."""
    parser = Parser("merges.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="keeps runs and checkpoints")
    folder = parser.parse_args().folder.resolve()
    found = measure(folder)
    RESULTS.write_text(report(found))
    PICTURE.write_text(draw(found))


if __name__ == "__main__":
    main()
