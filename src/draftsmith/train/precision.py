"""Products in bfloat16 on a CPU that has instructions for them, while everything else stays float32.

Weights, moments, activations and sums are float32; only the factors of matrix products are rounded, by oneDNN as it
reads them. That is less rounding than a GPU's bfloat16 step has (there activations and gradients are bfloat16 in memory),
and such products run at twice the rate (benchmarks/results/train_cpu.json).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

FLAGS = {"avx512_bf16", "amx_bf16"}
"""As /proc/cpuinfo has them. Without them bfloat16 is emulated, at a fraction of float32's rate."""


@lru_cache
def has_bf16_products(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bfloat16 by instructions of its own, and torch can use them."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), [])
    return bool(FLAGS & set(flags)) and torch.backends.mkldnn.is_available()


@contextmanager
def bf16_products(on: bool) -> Iterator[None]:
    """Within: products of float32 tensors on a CPU round their factors to bfloat16, if `on`. A setting of the process;
    put back at the end."""
    if not on:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
