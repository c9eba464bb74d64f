"""The shapes at which training steps are compared (drafters of Kimi-K2.5, Qwen3-8B and SmolLM2-135M)."""

from __future__ import annotations

import os

import torch

# H, query heads, key heads, head_dim, MLP, V, D
SHAPES = {
    "A": (7168, 64, 64, 128, 18432, 163840, 32000),
    "B": (4096, 32, 8, 128, 12288, 151936, 32000),
    "C": (576, 9, 3, 64, 1536, 49152, 16384),
    "same": (1024, 8, 2, 128, 2816, 8192, 4096),
}
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
BF16 = torch.bfloat16


def normal(gen: torch.Generator, *shape: int, std: float = 1.0) -> torch.Tensor:
    """bf16 normal numbers, made in slices."""
    out = torch.empty(shape, device=DEVICE, dtype=BF16)
    for i in range(0, shape[0], 8192):
        part = out[i : i + 8192]
        part.copy_(torch.randn(part.shape, generator=gen, device=DEVICE).mul_(std))
    return out
