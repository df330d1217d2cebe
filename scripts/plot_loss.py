"""Draws the loss of a run: `python scripts/plot_loss.py runs/demo` writes runs/demo/loss.png."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
import numpy as np


def read(folder: Path) -> tuple[list[dict], list[dict]]:
    """Rows of steps and rows of evaluations."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r for r in rows if "loss" in r], [r for r in rows if "validation_loss" in r]


def draw(folder: Path) -> Path:
    """Training loss, its running mean and the evaluations, over tokens."""
    steps, evaluations = read(folder)
    config = json.loads((folder / "run.json").read_text())["config"]
    layout, seq_length = config["layout"], config["model"]["seq_length"]
    tokens = np.array([row["consumed_tokens"] for row in steps])
    losses = np.array([row["loss"] for row in steps])
    width = max(1, len(losses) // 25)
    mean = np.convolve(losses, np.ones(width) / width, mode="valid")
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(tokens, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="each step")
    axes.plot(tokens[width - 1 :], mean, color="tab:blue", label=f"mean of {width} steps")
    places = [row["consumed_samples"] * seq_length for row in evaluations]
    values = [row["validation_loss"] for row in evaluations]
    axes.plot(places, values, "o", color="tab:orange", label="validation")
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss, nats per token")
    axes.set_title("tp {tp} x pp {pp} x dp {dp}, zero {zero}".format(**layout))
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "metrics.jsonl").exists():
        sys.exit("usage: python scripts/plot_loss.py FOLDER, a run's folder with metrics.jsonl")
    print(f"loss curve: {draw(Path(sys.argv[1]))}")
