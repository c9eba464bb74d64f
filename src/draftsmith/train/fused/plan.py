"""Which rows a batch makes the step compute: decided once on the host, so that nothing waits for the device later.

Rows that count are those of objective.supervision. Three lists follow from them:
  active   rows that count at any step: only these run through queries, o_proj, MLP and every step after the first.
           The other rows exist as step-0 keys and values alone. (A prompt of 60 % costs k/v and fc, nothing else.)
  losses   (step, active row) pairs that count: only these run through lm_head.
  teachers tokens whose target distribution some pair needs: each made once, whatever number of steps uses it.
Active rows and pairs are filled up to a multiple with rows of weight 0, so that few different shapes occur (a captured
graph serves one shape) and the usual full batch needs no index at all.

Order of blocks. With fewer active rows R than tokens T, per-row buffers hold the steps as 1, 2, … K-1, 0: then the
normed states lie as [T rows of step 0 | R rows of steps 1…K-1 | R active rows of step 0] and both what k/v read (all
but the last block) and what q reads (all but the first T) is one slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.train.batch import StepBatch
from draftsmith.train.fused.attention import Documents, documents
from draftsmith.train.fused.context import ContextPlan, plan_context
from draftsmith.train.objective import supervision


@dataclass(frozen=True)
class Plan:
    """T tokens, R active rows, K steps, N loss pairs, M teacher rows; index tensors live on the step's device.

    active int64 [R], inverse int32 [T] (-1 = not active): None if every row is. losses int64 [N] into the K*R rows of
    the block order: None if all pairs, in order. slot int32 [N]: teacher row of the pair; goal int32 [N]: draft index
    of the target's first choice; step int64 [N]; live float32 [N]: 0 for filling. teachers int64 [M]. counts float32
    [K]: pairs that count per step. context: where several ranks share the sequence."""

    T: int
    R: int
    K: int
    active: Tensor | None
    inverse: Tensor | None
    losses: Tensor | None
    slot: Tensor
    goal: Tensor
    step: Tensor
    live: Tensor
    teachers: Tensor
    counts: Tensor
    docs: Documents
    context: ContextPlan | None = None

    @property
    def compact(self) -> bool:
        return self.active is not None

    def block(self, s: int) -> slice:
        """Rows of step s in buffers of K*R rows."""
        b = (s - 1) % self.K if self.compact else s
        return slice(b * self.R, (b + 1) * self.R)

    def kv_block(self, s: int) -> slice:
        """Rows of step s in buffers of keys and values: T rows for step 0, then R for each later one."""
        return slice(0, self.T) if s == 0 else slice(self.T + (s - 1) * self.R, self.T + s * self.R)

    @property
    def kv_rows(self) -> int:
        return self.T + (self.K - 1) * self.R

    @property
    def shape(self) -> tuple[object, ...]:
        """What a captured graph depends on."""
        return (self.T, self.R, self.K, len(self.slot), len(self.teachers), self.docs.shape)


def fill_up(mask: Tensor, multiple: int) -> Tensor:
    """bool [n] with more entries set until their number is a multiple (or all are set)."""
    have = int(mask.sum())
    want = min(mask.numel(), -(-max(have, 1) // multiple) * multiple)
    if want > have:
        mask = mask.clone()
        mask[(~mask).nonzero()[: want - have, 0]] = True
    return mask


def draft_index(t2d: Tensor) -> Tensor:
    """bool [V] → int64 [V]: a token's index in the draft vocab, -1 if it has none."""
    return torch.where(t2d, t2d.long().cumsum(0) - 1, -1)


def make_plan(
    batch: StepBatch,
    t2d: Tensor,
    K: int,
    device: torch.device | str,
    mask: Tensor | None = None,
    multiple: int = 128,
    index: Tensor | None = None,
) -> Plan:
    """Plan of a batch whose fields are on the CPU (a batch on a device works, and waits for it).

    mask bool [K, T] replaces objective.supervision; index: draft_index(t2d), if at hand."""
    mask = (supervision(batch, t2d, K) if mask is None else mask).cpu()
    T = batch.tokens
    act = fill_up(mask.any(0), multiple)
    R = int(act.sum())
    active = act.nonzero()[:, 0]
    order: Sequence[int] = range(K) if R == T else [*range(1, K), 0]
    steps = torch.tensor(order)
    grid = mask[steps][:, active].flatten()  # [K*R] in block order
    chosen = fill_up(grid, multiple)
    losses = chosen.nonzero()[:, 0]
    step, row = steps[losses // R], active[losses % R]
    live = grid[losses]
    token = torch.where(live, row + 1 + step, 0)
    needed = torch.zeros(T, dtype=torch.bool)
    needed[token[live]] = True
    needed = fill_up(needed, multiple)
    slot = (needed.long().cumsum(0) - 1)[token].clamp_min(0)
    index = (draft_index(t2d) if index is None else index).cpu()
    goal = torch.where(live, index[batch.argmax.cpu()[token].clamp_min(0)], -1)
    inverse = torch.full((T,), -1, dtype=torch.int32)
    inverse[active] = torch.arange(R, dtype=torch.int32)

    def move(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=True)

    return Plan(
        T=T,
        R=R,
        K=K,
        active=None if R == T else move(active),
        inverse=None if R == T else move(inverse),
        losses=None if len(losses) == K * R else move(losses),
        slot=move(slot.int()),
        goal=move(goal.int()),
        step=move(step),
        live=move(live.float()),
        teachers=move(needed.nonzero()[:, 0]),
        counts=move(mask.sum(1).float()),
        docs=documents(batch.spans, T, device),
        context=None if batch.context is None else plan_context(batch.context, device),
    )
