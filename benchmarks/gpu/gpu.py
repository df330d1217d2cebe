"""Measures one GPU and its software: facts, ceilings, a calibration for the planner.

    python benchmarks/gpu/gpu.py facts --section FILE        driver, torch, NCCL, clocks, packages
    python benchmarks/gpu/gpu.py ceilings --section FILE     GEMMs, attention kernels, copies
    python benchmarks/gpu/gpu.py calibration --section FILE --calibration FILE.toml
    python benchmarks/gpu/gpu.py groups --section FILE       memory of communicators, two ranks

Each is a part of scripts/gpu_day.sh. FILE becomes {"lines": Markdown, "data": {...}}, written anew
with every finding. --device cpu tries the same with small shapes.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the project's own modules

from benchmarks.device_rates import EDGE, copy_rate, gemm_rate, seconds_of
from config.command_line import parse as parse_options
from costs import hardware
from distributed import local_ranks
from tools.checker import bandwidth

# (options of train.py, micro-batch): the models of all parts, the most important first.
MODELS = {
    "cuda": [("--model 1b3", 4), ("--model gpt2-124m", 64)],
    "cpu": [("--layers 2 --hidden 64 --heads 4 --seq-length 64 --vocab-size 512", 2)],
}
EXPANDABLE = "expandable_segments:True"  # distributed/context.py sets the same
PACKAGES = ("mpi4py", "h5py", "numpy", "psutil", "rich", "matplotlib", "tokenizers", "tensorboard")
PACKAGES += ("isal", "safetensors", "transformers", "bitsandbytes", "apex", "triton", "pytest")


class Section:
    """The findings of a part, in a file that is whole after each of them: a kill loses nothing."""

    def __init__(self, path: str):
        self.path, self.lines, self.data = Path(path), [], {}

    def add(self, *lines: str, **data: Any) -> None:
        """Add Markdown lines, which are printed too, and values."""
        self.lines += lines
        self.data |= data
        print(*lines, sep="\n", flush=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps({"lines": self.lines, "data": self.data}))
        draft.replace(self.path)


def device_name(device: str) -> str:
    """The GPU's name as the driver has it; of a CPU, its cores."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores"


def machine_of(name: str, memory: float = 0.0) -> hardware.Machine | None:
    """The planner's machine for a device of that name: of several, the one nearest in memory."""
    every = [hardware.load(each) for each in hardware.names()]
    fitting = [each for each in every if each.device in name]
    return min(fitting, key=lambda m: (abs(m.memory - memory), len(m.name)), default=None)


def this_machine(device: str) -> hardware.Machine | None:
    """The planner's machine for the device that is here."""
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0.0
    return machine_of(device_name(device), memory)


# ---- Facts ---------------------------------------------------------------------------------------


def facts(device: str, section: Section) -> None:
    """Report the machine, its packages, and whether torch's allocator works as train.py sets it.

    If the allocator does not, every run would fail.
    """
    name = device_name(device)
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    problem = allocator_problem(device)
    section.add(
        f"* device: {name}",
        f"* mpirun: {shutil.which('mpirun')}",
        f"* missing packages: {', '.join(missing) or 'none'}; without bitsandbytes the test of "
        "--optimizer adamw8bit is skipped",
        f"* {EXPANDABLE}: {problem or 'works'}",
        device=name,
        expandable_segments=not problem,
    )
    for command in ([sys.executable, "-m", "torch.utils.collect_env"], ["nvidia-smi"]):
        section.add("", "```", output_of(command), "```")


def output_of(command: list[str]) -> str:
    """Return a command's output and errors, or the reason why it cannot be started."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {type(error).__name__}"
    return f"{done.stdout}{done.stderr}".strip()


def allocator_problem(device: str) -> str:
    """Why no tensor can be allocated with segments that grow, in a process of its own; or empty."""
    code = f"import torch; torch.zeros(1, device={device!r})"
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": EXPANDABLE}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines() or [""]
    return f"status {done.returncode}: {lines[-1][:300]}" if done.returncode else ""


# ---- Ceilings ------------------------------------------------------------------------------------


def ceilings(device: str, section: Section) -> None:
    """The rates that no model can exceed here, in bf16: of a GEMM, of a copy, of attention."""
    square = gemm_rate(torch.device(device))
    copied = copy_rate(torch.device(device))
    section.add(f"* GEMM of {EDGE[device]}^3: {square / 1e12:.4g} TFLOP/s", gemm=square)
    section.add(f"* copy: {copied / 1e12:.3g} TB/s, bytes read and written", copy=copied)
    for words, micro_batch in MODELS[device]:
        size = attention_size(words, micro_batch)
        for kernel, seconds in attention_seconds(size, device).items():
            rate = attention_flops(size) / seconds / 1e12
            section.add(
                f"* {words}, attention, {kernel}: {1e3 * seconds:.3f} ms, {rate:.4g} TFLOP/s"
            )


def attention_size(words: str, micro_batch: int) -> tuple[int, int, int, int]:
    """(b, heads, s, d) of a row of MODELS."""
    shape = parse_options(words.split()).model
    return micro_batch, shape.heads, shape.seq_length, shape.head_size


def attention_flops(size: tuple[int, int, int, int]) -> float:
    """FLOPs of causal attention, forward and backward: 3.5 times the forward's causal half."""
    batch, heads, seq, width = size
    return 3.5 * 2.0 * batch * heads * seq**2 * width


def attention_seconds(size: tuple[int, int, int, int], device: str) -> dict[str, float]:
    """Seconds of forward and backward by kernel; those that refuse the shape are left out."""
    # Zeros would let the GPU clock higher.
    tensors = [torch.randn(*size, device=device, dtype=torch.bfloat16) for _ in range(4)]
    q, k, v = (tensor.requires_grad_() for tensor in tensors[:3])
    found = {}

    def both() -> tuple:
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(result, (q, k, v), tensors[3])

    for kind in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        try:
            with sdpa_kernel(getattr(SDPBackend, kind)):
                found[kind.lower()] = seconds_of(both, torch.device(device))
        except RuntimeError as error:  # torch raises it if a kernel does not take the shape
            print(f"{kind} does not run: {str(error).splitlines()[0]}", flush=True)
    return found


# ---- Calibration ---------------------------------------------------------------------------------


def calibration(device: str, section: Section, path: str) -> None:
    """Measured rates as the file that plan.py and tune.py take; checked by reading it again."""
    name, machine = device_name(device), this_machine(device)
    if machine is None:
        section.add(f"hardware/ has no machine for {name!r}: no fraction of its peak can be said.")
    taken = context_bytes() if device == "cuda" else None
    entries = {"bandwidth": copy_rate(torch.device(device))}
    if machine:
        peak = machine.peak if device == "cuda" else machine.vector_peak
        entries["gemm_fraction"] = gemm_rate(torch.device(device)) / peak
    if machine and device == "cuda":
        size = attention_size(*MODELS[device][0])
        best = min(attention_seconds(size, device).values())
        entries["flash_fraction"] = attention_flops(size) / best / machine.peak
        entries["context"] = taken
    Path(path).write_text(bandwidth.calibration_text(name, entries))
    if machine is None:
        return
    measured = hardware.load(machine.name, path)
    section.add("| rate | hardware/ | measured |", "| --- | --: | --: |")
    for key in entries:
        section.add(f"| {key} | {getattr(machine, key):.4g} | {getattr(measured, key):.4g} |")
    section.add(
        "",
        f"For `python plan.py ... --gpu {machine.name} --calibration {Path(path).name}`; links are "
        f"not in it: one GPU has none.",
        machine=machine.name,
        **entries,
    )


def context_bytes() -> float:
    """Bytes of GPU memory in use that no tensor takes: this process's context, if it is alone."""
    torch.zeros(1, device="cuda") @ torch.zeros(1, device="cuda")  # loads cuBLAS
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved())


# ---- Communicators -------------------------------------------------------------------------------

GROUPS = (2, 4, 8)  # so many groups exist beside that of all ranks
RANK_OF_GROUPS = """
import sys
from config.run_options import Run
from distributed.context import start
from distributed.launch import discover
from benchmarks.gpu.gpu import grow_groups

context = start(discover(), Run(device=sys.argv[1], watchdog=False))
grow_groups(context)
context.stop()
"""


def groups(device: str, section: Section) -> None:
    """Report the bytes that each group of two ranks takes outside torch's allocator.

    Both ranks are on the one GPU. On CPUs the resident bytes of rank 0 take their place.
    """
    places = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    places |= {"MASTER_PORT": str(local_ranks.free_port()), "TORCHELASTIC_RUN_ID": "groups"}
    places |= {"TRINE_TEST_SHARE_GPU": "1", "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RANK_OF_GROUPS, device]
    ranks = []
    for rank in "01":
        environment = os.environ | places | {"RANK": rank, "LOCAL_RANK": rank}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank failed: {printed}")
    lines = [line for line in printed[0].splitlines() if line.startswith("{")]
    for found in map(json.loads, lines):
        section.add(f"* {found['groups']} groups: {found['bytes'] / 2**20:.1f} MiB more than none")
        section.add(**{f"groups_{found['groups']}": found["bytes"]})


def grow_groups(context: Any) -> None:
    """Make groups of all ranks one after the other, use each, and print what they take."""

    def taken() -> int:
        if context.device.type == "cpu":
            return psutil.Process().memory_info().rss
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    number = torch.zeros(1, device=context.device)
    torch.distributed.all_reduce(number)
    before, kept = taken(), []
    for count in GROUPS:
        while len(kept) < count:
            kept.append(torch.distributed.new_group())
            torch.distributed.all_reduce(number, group=kept[-1])
        if context.rank == 0:
            print(json.dumps({"groups": count, "bytes": taken() - before}), flush=True)


def main() -> None:
    """One part, into its section's file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("facts", "ceilings", "calibration", "groups"))
    parser.add_argument("--section", required=True, help="file for the findings")
    parser.add_argument("--calibration", help="TOML file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    o = parser.parse_args()
    if o.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} finds no CUDA device; --device cpu rehearses")
    section = Section(o.section)
    if o.part == "calibration":
        calibration(o.device, section, o.calibration or "calibration.toml")
    else:
        {"facts": facts, "ceilings": ceilings, "groups": groups}[o.part](o.device, section)


if __name__ == "__main__":
    main()
