"""How well a setup would draft on the sample: acceptance by the engine's walk, and a finer score that also moves where
acceptance is still zero.

The score is the negative log-likelihood that the drafter gives to the target's own choice, at each position from which
the target answers. Two setups are compared position by position on the same text, so small true differences show.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.diagnose.subject import SampleRow, Setup, Subject
from draftsmith.drafter.model import Steps
from draftsmith.train.objective import shift
from draftsmith.train.validate import Acceptance, agreement, proposals, walk

UNDRAFTABLE = 20.0
"""Nats charged where the target's choice is outside the draft vocab: it can never be proposed."""


@dataclass(frozen=True)
class Score:
    """nll float32 [N]: per (step, position) nats, undraftable choices at a constant; row int64 [N]: which row each is of."""

    nll: Tensor
    row: Tensor

    @property
    def mean(self) -> float:
        return float(self.nll.mean())

    def gain_over(self, base: Score) -> tuple[float, float]:
        """(mean nats gained against `base`, its standard error over rows)."""
        delta = base.nll - self.nll
        rows = int(self.row.max()) + 1
        counts = torch.zeros(rows).index_add_(0, self.row, torch.ones_like(delta))
        sums = torch.zeros(rows).index_add_(0, self.row, delta)
        means = sums[counts > 0] / counts[counts > 0]
        error = float(means.std() / len(means) ** 0.5) if len(means) > 1 else float("inf")
        return float(delta.mean()), error


@torch.no_grad()
def score(setup: Setup, rows: list[SampleRow], steps: int = 2) -> Score:
    """Nats per position and step of `rows` under `setup`."""
    model = setup.module()
    D = setup.config.draft_vocab_size
    to_draft = torch.full((setup.config.vocab_size,), -1, dtype=torch.int64)
    to_draft[torch.arange(D) + setup.tensors["d2t"]] = torch.arange(D)
    parts: list[Tensor] = []
    owners: list[Tensor] = []
    for i, row in enumerate(rows):
        batch = setup.batch(row)
        state, done = model.fuse(batch.aux), Steps(spans=batch.spans)
        for s in range(steps):
            normed, state = model.step(state, model.embed(shift(batch.token_ids, s + 1, 0)), batch.position + s, done)
            # Row t proposes token t + 2 + s; the target's own choice there is argmax[t + 1 + s].
            valid = torch.arange(row.tokens) + 2 + s < row.tokens
            valid &= torch.arange(row.tokens) + 1 + s >= row.boundary - 1
            wanted = to_draft[shift(batch.argmax, s + 1, 0)[valid].clamp(min=0)]
            logits = torch.log_softmax(model.lm_head(normed[valid]).float(), dim=-1)
            nll = -logits.gather(1, wanted.clamp(min=0)[:, None])[:, 0].clamp(min=-UNDRAFTABLE)
            parts.append(torch.where(wanted >= 0, nll, torch.full_like(nll, UNDRAFTABLE)))
            owners.append(torch.full((int(valid.sum()),), i, dtype=torch.int64))
    return Score(torch.nan_to_num(torch.cat(parts), nan=UNDRAFTABLE, posinf=UNDRAFTABLE), torch.cat(owners))


@torch.no_grad()
def acceptance(setup: Setup, rows: list[SampleRow], steps: int) -> Acceptance:
    """The engine's walk over every row under `setup`."""
    model = setup.module()
    total = Acceptance([0] * steps)
    for row in rows:
        batch = setup.batch(row)
        total += walk(agreement(batch, proposals(model, batch, steps)).tolist(), row.boundary, row.tokens, steps)
    return total


def base_acceptance(subject: Subject) -> Acceptance:
    """Acceptance of the drafter as its files say."""
    return acceptance(subject.setup(), subject.rows, subject.steps)
