"""What changes as training goes on: learning rate and number of draft steps, as functions of progress alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftsmith.recipe import TrainSection


@dataclass(frozen=True)
class Schedule:
    """progress: packs consumed / packs of the run, 0…1; so neither the number of ranks nor a resume changes it."""

    lr: float
    min_lr: float
    warmup: float
    steps: int
    warm_fraction: float

    @staticmethod
    def of(section: TrainSection) -> Schedule:
        return Schedule(section.lr, section.min_lr, section.warmup, section.ttt_steps, section.warm_fraction)

    def rate(self, progress: float) -> float:
        """Linear rise over `warmup`, then a cosine down to min_lr * lr."""
        if progress < self.warmup:
            return self.lr * (progress + 1e-3) / (self.warmup + 1e-3)
        done = (progress - self.warmup) / max(1 - self.warmup, 1e-9)
        return self.lr * (self.min_lr + (1 - self.min_lr) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))

    def draft_steps(self, progress: float) -> int:
        """One draft step for the first warm_fraction (cheap, and the later steps build on the first), then all."""
        return 1 if progress < self.warm_fraction else self.steps
