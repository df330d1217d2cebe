"""Compiles and loads device_guard.cpp, without which torch refuses fake tensors of device cuda.

    load()          # before torch is imported
    import torch

torch asks a device guard which device and which stream are current. Its guard for cuda asks the
driver; the guard that is compiled here (device_guard.cpp) needs no driver. The machine's compiler
compiles it once for each version of torch, into ~/.cache/trine.
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

from base.errors import SET_UP, FileError, PackageError

SOURCE = Path(__file__).with_name("device_guard.cpp")
COMPILERS = ("g++", "c++", "clang++")


def load(cache: Path | None = None) -> None:
    """Load the guard, import torch, and replace torch's guard for device cuda.

    cache: the folder with the compiled guard, default ~/.cache/trine; the guard is compiled if the
    folder lacks it. Raise UserError if torch or a compiler is missing, or if the compiler fails.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise PackageError(f"rehearse.py needs torch: {SET_UP}")
    torch_folder = Path(spec.origin).parent
    version = runpy.run_path(str(torch_folder / "version.py"))
    library = _compiled(torch_folder, version, cache or Path.home() / ".cache" / "trine")
    if version["cuda"]:
        # In a CUDA build of torch, load torch's own CUDA library before the guard: torch keeps the
        # hooks that are registered first, and prints a warning about the guard's hooks.
        ctypes.CDLL(str(torch_folder / "lib" / "libtorch_cuda.so"))
    guard = ctypes.CDLL(str(library))
    importlib.import_module("torch")
    # This comes after the import, since torch keeps the guard that is registered last.
    guard.replace_guard()


def _compiled(torch_folder: Path, version: dict, cache: Path) -> Path:
    """Return the path of the guard for this torch, in the folder `cache`; compile it if needed.

    version: the variables of torch/version.py. The file's name has torch's version and a hash of
    the source and of torch's folder.
    """
    source_hash = hashlib.sha256(SOURCE.read_bytes() + str(torch_folder).encode()).hexdigest()
    library = cache / f"device_guard-{version['__version__']}-{source_hash[:16]}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise PackageError(
            f"rehearse.py compiles {SOURCE.name} once, and none of {', '.join(COMPILERS)} is on "
            f"PATH: install a C++ compiler, or load its module"
        )
    # Another process may compile the guard at the same time, so each process writes a file of its
    # own, and then renames it.
    part = library.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(part)]
    command += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    command += [f"-Wl,-rpath,{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise FileError(f"cannot write {library}: {error.strerror}") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise PackageError(f"{compiler} cannot compile {SOURCE.name}: {first.strip()}")
    os.replace(part, library)
    return library
