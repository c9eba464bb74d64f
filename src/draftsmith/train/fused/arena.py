"""Working memory of a step: one block, taken from its start as the step goes, given back at its end.

The same addresses return every step: no allocator work, no page faults on a CPU, and a captured graph stays valid.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGN = 256


class Arena:
    """`take` hands out uninitialised tensors; `mark`/`release` give back all taken since. Until the block has grown
    to what one step needs, requests beyond its end are served by the allocator."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.block = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.used = self.peak = 0

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        start = self.used
        self.used += -(-size // ALIGN) * ALIGN
        self.peak = max(self.peak, self.used)
        if self.used > self.block.numel():
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self.block[start : start + size].view(dtype).view(shape)

    def mark(self) -> int:
        return self.used

    def release(self, mark: int) -> None:
        self.used = mark

    def reset(self) -> None:
        """Start of a step: grow the block to the largest need seen."""
        self.used = 0
        if self.peak > self.block.numel():
            self.block = torch.empty(0, dtype=torch.uint8, device=self.device)
            self.block = torch.empty(self.peak, dtype=torch.uint8, device=self.device)
