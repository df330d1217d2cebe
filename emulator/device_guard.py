"""Compiles and loads device_guard.cpp, without which torch refuses fake tensors of device cuda.

    load()          # before torch is imported
    import torch

It is compiled once for each version of torch, by the machine's compiler, into a folder of the user.
"""

import ctypes
import hashlib
import importlib
import importlib.util
import os
import runpy
import shutil
import subprocess
from pathlib import Path

from config.messages import UserError

SOURCE = Path(__file__).with_name("device_guard.cpp")
COMPILERS = ("g++", "c++", "clang++")


def load(cache: Path | None = None) -> None:
    """Load the guard, compiled if need be into `cache`, default ~/.cache/trine.

    UserError if torch or a compiler is missing, or the compiler fails. It imports torch then: on a
    build for CUDA the guard replaces torch's own.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise UserError("rehearse.py needs torch: run scripts/setup.sh")
    torch_folder = Path(found.origin).parent
    about = runpy.run_path(str(torch_folder / "version.py"))
    library = _compiled(torch_folder, about, cache or Path.home() / ".cache" / "trine")
    if about["cuda"]:  # its hooks first: where they come second, torch prints that it skips them
        ctypes.CDLL(str(torch_folder / "lib" / "libtorch_cuda.so"))
    guard = ctypes.CDLL(str(library))
    importlib.import_module("torch")
    guard.replace_guard()


def _compiled(torch_folder: Path, about: dict, cache: Path) -> Path:
    """The compiled guard for this torch: its name has torch's version and a hash of the source."""
    source = hashlib.sha256(SOURCE.read_bytes() + str(torch_folder).encode()).hexdigest()[:16]
    library = cache / f"device_guard-{about['__version__']}-{source}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise UserError(
            f"rehearse.py compiles {SOURCE.name} once, and none of {', '.join(COMPILERS)} is on "
            f"PATH: install a C++ compiler, or load its module"
        )
    part = library.with_suffix(f".{os.getpid()}")  # another process may compile it too
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(part)]
    command += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    command += [f"-Wl,-rpath,{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"cannot write {library}: {error.strerror}") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise UserError(f"{compiler} cannot compile {SOURCE.name}: {first.strip()}")
    os.replace(part, library)
    return library
