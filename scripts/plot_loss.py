"""Draws the loss of a run: `python scripts/plot_loss.py runs/demo` writes runs/demo/loss.png.

Below the loss of a model with experts is the load of each block's busiest expert.
"""

import io
import sys
from pathlib import Path
from typing import Any

# Python puts this script's folder on the path; the modules that it uses are in its parent.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from base import errors  # first: it ends a Python that is too old

if __name__ == "__main__":
    errors.begin_program()

with errors.installed():
    import numpy as np

    from base.cli import Parser
    from base.paths import check_folder, write_file
    from tools.numerics.record import read_steps


def draw(folder: Path) -> Path:
    """Training loss, its running mean and the evaluations, over tokens; UserError."""
    run = read_steps(folder)
    layout = run.facts["config"]["layout"]
    seq_length = run.facts["config"]["model"]["seq_length"]
    evaluations = [row for row in run.rows if "validation_loss" in row]
    tokens = np.array([row["consumed_tokens"] for row in run.steps])
    # Old versions have not written it in the rows of evaluations.
    places = [
        row.get("consumed_tokens", row["consumed_samples"] * seq_length) for row in evaluations
    ]
    losses = np.array([row["loss"] for row in run.steps])
    check_folder("FOLDER", str(folder))
    with errors.installed():
        import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    width = max(1, len(losses) // 25)
    mean = np.convolve(losses, np.ones(width) / width, mode="valid")
    loads = [row["expert_loads"] for row in run.steps if "expert_loads" in row]
    panels = 2 if len(loads) == len(losses) else 1
    size = (8, 4.5 if panels == 1 else 7)
    figure, grid = plt.subplots(
        panels, figsize=size, layout="constrained", sharex=True, squeeze=False
    )
    axes, *others = grid[:, 0]
    for below in others:
        _draw_loads(below, tokens, np.array(loads))
    axes.plot(tokens, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="each step")
    axes.plot(tokens[width - 1 :], mean, color="tab:blue", label=f"mean of {width} steps")
    values = [row["validation_loss"] for row in evaluations]
    axes.plot(places, values, "o", color="tab:orange", label="validation")
    (axes, *others)[-1].set_xlabel("tokens")
    axes.set_ylabel("loss, nats per token")
    axes.set_title("tp {tp} x pp {pp} x dp {dp}, zero {zero}".format(**layout))
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    write_file(str(path), file.getvalue())
    return path


def _draw_loads(axes: Any, tokens: np.ndarray, loads: np.ndarray) -> None:
    """Draw the rows of each block's busiest expert over the mean: (steps, blocks)."""
    for block, load in enumerate(loads.T):
        axes.plot(tokens, load, linewidth=0.8, label=f"block {block}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("busiest expert, rows over the mean")
    axes.grid(alpha=0.3)
    axes.legend(ncols=max(1, loads.shape[1] // 4))


def main() -> None:
    """Draw the loss of the run that the command line names; a mistake is exit status 2."""
    parser = Parser(description="Draw the loss of a run.")
    parser.add_argument("folder", type=Path, help="the --out of a run of train.py")
    with errors.sentences():
        print(f"loss curve: {draw(parser.parse_args().folder)}")


if __name__ == "__main__":
    main()
