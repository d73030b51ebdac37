"""Compiles the backend when it is first needed. The library is kept, by its sources and torch's version."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

BACKEND = Path(__file__).parent / "backend"
SOURCES = sorted(BACKEND.glob("*.cpp"))
HEADERS = sorted(BACKEND.glob("*.h"))
# Torch is compiled with these; the headers of single operations are a tenth of those of all.
OPTIONS = ["-std=c++20", "-O1", "-fPIC", "-DAT_PER_OPERATOR_HEADERS"]


class CompilerMissingError(Exception):
    """There is nothing to compile the backend with."""


def library() -> Path:
    """Returns the path of the compiled backend, of which several processes may ask at once."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the system, however the process ends
        if not path.exists():
            _compile(path)
    return path


def _path() -> Path:
    text = [torch.__version__, sys.platform, _compiler() or "", *OPTIONS]
    text += [path.read_text(encoding="utf-8") for path in (*HEADERS, *SOURCES)]
    key = hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]
    return Path(cpp_extension.get_default_build_root()) / "fxpipe_simulated" / key / "accelerator.so"


def _compiler() -> str | None:
    return shutil.which(cpp_extension.get_cxx_compiler())


def _compile(library: Path) -> None:
    """Compiles each source by itself, in parallel.

    Not by `cpp_extension.load`: that needs ninja, and waits for ever for a lock that a killed process has left.
    """
    compiler = _compiler()
    if compiler is None:
        name = cpp_extension.get_cxx_compiler()
        raise CompilerMissingError(f"the simulated accelerator has to be compiled, and {name} is not on the path")
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"

    def compiled(source: Path) -> str:
        target = str(library.with_name(source.stem + ".o"))
        _run([compiler, *OPTIONS, abi, *includes, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, SOURCES))
    paths = [f"-L{path}" for path in cpp_extension.library_paths()]
    partial = library.with_suffix(".partial")
    _run([compiler, "-shared", "-Wl,--no-undefined", *objects, *paths, "-ltorch_cpu", "-lc10", "-o", str(partial)])
    partial.rename(library)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
