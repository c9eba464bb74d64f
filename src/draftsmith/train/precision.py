"""Products in bfloat16 on a CPU that has instructions for them, while everything else stays float32.

Weights, moments, activations and sums are float32; only the factors of matrix products are rounded, by oneDNN as it
reads them. That is less rounding than a GPU's bfloat16 step has (there activations and gradients are bfloat16 in memory),
and such products run at twice the rate (benchmarks/results/train_cpu.json).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftsmith.cpu import multiplies_bf16


def has_bf16_products() -> bool:
    """Whether this CPU multiplies bfloat16 by instructions of its own (otherwise it is emulated, at a fraction of float32's
    rate), and this torch can use them."""
    return multiplies_bf16() and torch.backends.mkldnn.is_available()


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
