"""Speed and memory of one GPU: the measured GEMM ceiling, then steady training steps.

    python benchmarks/gpu.py                 writes benchmarks/results/gpu-<device>.md
    python benchmarks/gpu.py --device cpu --out FILE     the same path on a CPU, small shapes

Each model is a run of train.py in a process of its own, at the largest micro-batch of the list
that fits; the first WARM_UP steps are left out and the median of the rest is quoted.
"""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the project's own modules

from config.messages import Parser, UserError, exit_with
from planner import hardware

WARM_UP, STEPS = 5, 20
MODELS = {
    "cuda": [("gpt2-124m", (64, 32, 16, 8, 4)), ("1b3", (16, 8, 4, 2, 1))],
    "cpu": [("gpt2-124m --layers 2 --hidden 128 --heads 4 --seq-length 128", (4,))],
}


def gemm_ceiling(device: str) -> tuple[float, int]:
    """FLOP/s of the fastest square bf16 product on random data, and its size."""
    best = (0.0, 0)
    for size in (4096, 8192, 12288) if device == "cuda" else (512,):
        a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        for _ in range(3):
            a @ b
        seconds = []
        for _ in range(10):
            synchronise(device)
            began = time.perf_counter()
            a @ b
            synchronise(device)
            seconds.append(time.perf_counter() - began)
        best = max(best, (2 * size**3 / statistics.median(seconds), size))
    return best


def synchronise(device: str) -> None:
    """Wait for the GPU, if it is one."""
    if device == "cuda":
        torch.cuda.synchronize()


def train(model: str, micro_batches: tuple[int, ...], device: str) -> dict:
    """Steady figures of one model at the largest micro-batch that fits; raises if none does."""
    errors = ""
    for micro_batch in micro_batches:
        with tempfile.TemporaryDirectory() as out:
            words = f"--model {model} --precision bf16 --device {device} --steps {STEPS}"
            words += f" --micro-batch-size {micro_batch} --global-batch-size {2 * micro_batch}"
            command = [sys.executable, "train.py", *words.split(), "--out", out]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode == 0:
                lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
                rows = [json.loads(line) for line in lines][WARM_UP:]
                facts = json.loads((Path(out) / "run.json").read_text())
                return figures(model, micro_batch, rows, facts)
            errors = done.stderr
            if "out of memory" not in errors.lower():
                break
    raise RuntimeError(f"{model} did not run:\n{errors}")


def figures(model: str, micro_batch: int, rows: list[dict], facts: dict) -> dict:
    """What the report says of one run, from its metrics without the warm-up, and run.json."""
    tokens = sorted(row["tokens_per_second"] for row in rows)
    return {
        "model": model,
        "micro_batch": micro_batch,
        "tokens": statistics.median(tokens),
        "slowest": tokens[0],
        "fastest": tokens[-1],
        "tflops": statistics.median(row["tflops_model"] for row in rows),
        "memory": max(row["peak_memory_bytes"] for row in rows),
        "formula": facts["flops_formula"],
        "attention": facts["kernels"]["attention"],
        "optimizer": facts["kernels"]["optimizer"],
    }


def peak_of(name: str) -> float | None:
    """Dense half-precision peak in FLOP/s of the GPU of that name, if hardware/ knows it."""
    machines = map(hardware.load, hardware.names())
    return next((m.peak for m in machines if m.device != "CPU" and m.device in name), None)


def report(device: str, name: str, ceiling: tuple[float, int], results: list[dict]) -> str:
    """The results file: the ceiling, then a row for each model."""
    peak = peak_of(name)
    share = f"{ceiling[0] / peak:.1%} of {peak / 1e12:.0f}" if peak else "peak unknown"
    lines = [
        f"# One {name}",
        "",
        f"`python benchmarks/gpu.py --device {device}`, {time.strftime('%Y-%m-%d')}, "
        f"Python {platform.python_version()}, torch {torch.__version__}",
        "",
        f"GEMM ceiling: {ceiling[0] / 1e12:.1f} TFLOP/s, bf16, {ceiling[1]}^3, random data, "
        f"median of 10 ({share}).",
        "",
        f"Training, bf16 with fp32 masters and gradients, median of steps {WARM_UP + 1} to {STEPS}"
        f" (slowest to fastest); model FLOPs by formula {results[0]['formula']}; "
        f"{results[0]['attention']}; {results[0]['optimizer']}.",
        "",
        "| model | micro-batch | tokens/s | model TFLOP/s | MFU | of the ceiling | peak memory |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for r in results:
        mfu = f"{r['tflops'] * 1e12 / peak:.1%}" if peak else "unknown"
        lines.append(
            f"| {r['model']} | {r['micro_batch']} | {r['tokens']:,.0f} "
            f"({r['slowest']:,.0f} to {r['fastest']:,.0f}) | {r['tflops']:.2f} | {mfu} | "
            f"{r['tflops'] * 1e12 / ceiling[0]:.1%} | {r['memory'] / 2**30:.2f} GiB |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the results file."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", help="default: benchmarks/results/gpu-<device name>.md")
    try:
        options = parser.parse_args()
        if options.device == "cuda" and not torch.cuda.is_available():
            raise UserError("torch sees no CUDA device; --device cpu rehearses with small shapes")
    except UserError as mistake:
        exit_with(mistake)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    ceiling = gemm_ceiling(options.device)
    print(f"GEMM ceiling {ceiling[0] / 1e12:.2f} TFLOP/s at {ceiling[1]}", flush=True)
    results = []
    for model, micro_batches in MODELS[options.device]:
        results.append(train(model, micro_batches, options.device))
        print(f"{model}: {results[-1]['tokens']:,.0f} tokens/s", flush=True)
    text = report(options.device, name, ceiling, results)
    slug = name.lower().replace(" ", "-")
    path = Path(options.out) if options.out else ROOT / "benchmarks" / "results" / f"gpu-{slug}.md"
    path.write_text(text)
    print(text + f"written to {path}")


if __name__ == "__main__":
    main()
