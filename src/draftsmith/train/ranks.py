"""How many processes train together, and what they exchange: one process does nothing here.

Every rank takes its own pack of an optimizer step; losses are divided by the counts of all ranks, so gradients are
*summed*, never averaged, and the step is the same as one process would do with all packs in one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafter.model import Drafter
from draftsmith.train.optim import Optimizer


@dataclass(frozen=True)
class Ranks:
    """rank of count processes."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Sum over ranks (a copy)."""
        if self.count == 1:
            return value
        out = value.clone()
        torch.distributed.all_reduce(out)
        return out

    def reduce_and_step(self, model: Drafter, optimizer: Optimizer, lr: float, clip: float) -> Tensor:
        """Sum gradients over ranks (in float32), then one optimizer step on every rank alike; returns the norm."""
        if self.count > 1:
            for _, p in model.trained():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                wide = grad.float()
                torch.distributed.all_reduce(wide)
                p.grad = wide.to(grad.dtype)
        return optimizer.step(lr, clip)
