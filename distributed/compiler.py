"""Checks that a node has what torch.compile needs; loaded by runs that compile a kernel."""

import importlib.util
import os
import shutil

from config.messages import UserError


def check(kernels: dict[str, str], device: str, node: str) -> None:
    """Raise UserError if this node lacks a compiler, or triton where there is a GPU.

    Called by start_checks.check_compiler for a run that compiles a kernel. kernels: the names of
    the run's kernels by kind; "compiled" is there with --compile. device: cpu or cuda. node: the
    name of this node.
    """
    on_gpu = device == "cuda"
    what = "--compile" if "compiled" in kernels else kernels["attention"]
    # On a GPU triton calls a C compiler, on a CPU torch calls a C++ compiler.
    variable, default = ("CC", "gcc") if on_gpu else ("CXX", "g++")
    name = os.environ.get(variable, default)
    if shutil.which(name) is None:
        raise UserError(
            f"{what} needs a compiler, and {node} has no {name}: install g++ there, load the "
            f"cluster's module of gcc, or give another one in {variable}"
        )
    if on_gpu and importlib.util.find_spec("triton") is None:
        raise UserError(f"{what} needs triton on GPUs, and {node} has none: pip install triton")
