"""How fast: measured rates of earlier runs where there are any, else an assumption that says what it is.

An assumption is the machine's peak arithmetic times a share that was seen in practice, over the work of one token.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.record import read_record

GPU_TFLOPS: tuple[tuple[str, float], ...] = (
    # dense bf16 peaks of the data sheets, TFLOP/s; the first name that the device's contains
    ("H200", 989),
    ("H100", 989),
    ("B200", 2250),
    ("A100", 312),
    ("L40", 181),
    ("A10", 125),
    ("4090", 165),
    ("RTX PRO 6000", 500),
)
CPU_GFLOPS_PER_CORE = 100.0
"""float32 products on an AVX2 core at 3 GHz: two 8-wide fused multiply-adds a cycle."""

SHARE = {
    "gpu": {"prefill": 0.4, "decode": 0.1, "train": 0.4},
    "cpu": {"prefill": 0.8, "decode": 0.4, "train": 0.7},
}
"""Share of the peak that large enough work reaches (SmolLM2-135M on two cores: prefill 550-1,170 tok/s, capture 300,
training 1,600 at K = 3; drafters on an H200: 0.40 to 0.58). Decoding reads weights more than it computes."""


@dataclass(frozen=True)
class Rate:
    """tokens per second, and where the figure is from ("given", "measured …", "assumed …")."""

    value: float
    source: str


@dataclass(frozen=True)
class Machine:
    """flops: peak operations per second of all devices together, memory: bytes of one device."""

    name: str
    devices: int
    flops: float
    memory: int | None
    is_gpu: bool = False


def this_machine(devices: int | None = None) -> Machine:
    """What is here: GPUs as nvidia-smi tells, else the CPU's cores."""
    if shutil.which("nvidia-smi"):
        ask = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        found = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=30).stdout.strip().splitlines()
        if found:
            name, _, memory = found[0].rpartition(",")
            count = devices or len(found)
            peak = next((t for n, t in GPU_TFLOPS if n in name), 300.0)
            return Machine(
                f"{count} x {name.strip()}", count, count * peak * 1e12, int(float(memory) * 2**20), is_gpu=True
            )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(f"{cores} CPU cores", 1, cores * CPU_GFLOPS_PER_CORE * 1e9, memory_bytes)


def measured(folder: Path, stage: str) -> dict[str, Any]:
    """The result of a finished stage of this run, {} where there is none."""
    record = read_record(folder / stage)
    if not record or record.get("status") != "done":
        return {}
    return dict(record.get("result") or {}) | {"seconds": record.get("seconds")}


def choose(given: float | None, result: dict[str, Any], kind: str, work: float, machine: Machine) -> Rate | None:
    """The rate of a stage: given by the user, measured by an earlier run, or assumed from `work` operations per token
    (0 = not known: None)."""
    if given:
        return Rate(given, "given")
    if value := result.get("tokens_per_second"):
        return Rate(float(value), "measured in this run's folder")
    if not work:
        return None
    share = SHARE["gpu" if machine.is_gpu else "cpu"][kind]
    value = machine.flops * share / work
    return Rate(value, f"assumed: {share:.0%} of {machine.flops / 1e12:.3g} TFLOP/s ({machine.name})")
