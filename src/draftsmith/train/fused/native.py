"""kernels.c, built with the machine's own C compiler when it is first needed and kept in the cache ($DRAFTSMITH_HOME).

About a second, once a machine. Nothing depends on it: without a compiler, or with DRAFTSMITH_NATIVE=0, plain torch
computes the same (ops.ops_for). Threads are OpenMP's, whose library is the one that torch has loaded already: two of
them would wait for each other's cores.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.record import sha256_bytes
from draftsmith.target.packages import home

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
TYPES = {torch.float32: (), torch.float64: ("-DDOUBLE",)}


@lru_cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The kernels for float32 or float64; None where they cannot be had."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    shares_openmp = platform.system() == "Linux" and "OpenMP" in torch.__config__.parallel_info()
    if dtype not in TYPES or not compiler or not shares_openmp or os.environ.get("DRAFTSMITH_NATIVE") == "0":
        return None
    command = [compiler, *FLAGS, *TYPES[dtype], str(SOURCE), "-lm"]
    try:
        return ctypes.CDLL(str(_built(command)))
    except (OSError, subprocess.SubprocessError):
        return None


def _built(command: list[str]) -> Path:
    """The shared library that the command makes, from the cache if it was made on a machine like this one."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    key = "\n".join([SOURCE.read_text(encoding="utf-8"), *command, version, _cpu()])
    folder = home() / "native"
    path = folder / f"{sha256_bytes(key.encode())[:24]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build.") as tmp:
            made = Path(tmp) / path.name
            subprocess.run([*command, "-o", str(made)], capture_output=True, timeout=120, check=True)
            made.replace(path)
    return path


def _cpu() -> str:
    """What -march=native looks at: a cache may be shared by machines that differ."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return "\n".join(
        [platform.machine(), *sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})]
    )


def call(name: str, dtype: torch.dtype, *args: Tensor | int | float | None) -> None:
    """Run one kernel: tensors go as addresses (None: null), integers as int64, floats as double; threads come first."""
    kernels = library(dtype)
    assert kernels is not None
    values: list[Any] = [ctypes.c_int64(torch.get_num_threads())]
    for a in args:
        if a is None or isinstance(a, Tensor):
            values.append(ctypes.c_void_p(None if a is None else a.data_ptr()))
        else:
            values.append(ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_double(a))
    getattr(kernels, name)(*values)
