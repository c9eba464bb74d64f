"""Loss of all K steps in one pass over the states that count: teacher, lm_head, cross-entropy and their gradients.

The pairs (step, row) that count are taken in chunks; a chunk's logits are made, turned in place into their gradient
and used up. So neither [K*T, D] nor [T, V] ever exists, lm_head costs nothing where nothing is learnt, and its weight
gradient is one product per chunk into one buffer. The teacher's logits over the draft vocab are made once per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from draftsmith.train.batch import StepBatch
from draftsmith.train.fused.arena import Arena
from draftsmith.train.fused.plan import Plan
from draftsmith.train.objective import TargetHead


def chunks(total: int, most: int) -> Iterator[slice]:
    """Even slices of at most `most`."""
    parts = max(1, -(-total // max(most, 1)))
    size = -(-total // parts)
    for i in range(0, total, size):
        yield slice(i, min(i + size, total))


@dataclass
class FullTeacher:
    """Finds the target's first choice over the whole vocabulary within the step, for states stored without it.

    lm_head [V, G] of the target; draft_ids int64 [D] ascending; index int32 [V]: draft index or -1. The vocabulary is
    walked in blocks with a running maximum; the draft tokens' logits are picked out on the way."""

    lm_head: Tensor
    draft_ids: Tensor
    index: Tensor
    block: int = 32768

    def __post_init__(self) -> None:
        edges = torch.arange(0, self.lm_head.shape[0] + self.block, self.block)
        at = torch.searchsorted(self.draft_ids.cpu(), edges).tolist()
        self.parts = [
            (first, slice(a, b), (self.draft_ids[a:b] - first))
            for first, a, b in zip(edges.tolist(), at, at[1:], strict=False)
        ]

    def run(self, normed: Tensor, out: Tensor, ops: ModuleType, arena: Arena) -> Tensor:
        """normed [M, G] → logits over the draft vocab into out [M, D]; returns the first choice int64 [M]."""
        best = torch.full((normed.shape[0],), float("-inf"), device=normed.device, dtype=torch.float32)
        arg = torch.zeros(normed.shape[0], device=normed.device, dtype=torch.int64)
        mark = arena.mark()
        for first, columns, local in self.parts:
            rows = self.lm_head[first : first + self.block]
            logits = torch.mm(normed, rows.t(), out=arena.take(normed.shape[0], rows.shape[0], dtype=normed.dtype))
            ops.running_max(logits, first, best, arg)
            out[:, columns] = logits[:, local]
            arena.release(mark)
        return arg


def teacher_logits(
    batch: StepBatch, plan: Plan, head: TargetHead | None, out: Tensor, ops: ModuleType, arena: Arena
) -> None:
    """The target's logits over the draft vocab after the tokens plan.teachers → out [M, D], up to a constant per row.

    Of a shortened teacher (top k), the mass of the other draft tokens is spread over them evenly (objective.teacher)."""
    if batch.topk is not None:
        ids, logits, rest = (x[plan.teachers] for x in batch.topk)
        others = rest.to(torch.promote_types(rest.dtype, torch.float32)) - math.log(max(out.shape[1] - ids.shape[1], 1))
        # finite, where nothing is left over: probability times logit must not become 0 * inf
        out.copy_(others.clamp_min(-1e30)[:, None].expand_as(out))
        out.scatter_(1, ids, logits.to(out.dtype))
        return
    if batch.final is None or head is None:
        raise ValueError("a batch without stored top-k logits needs final states and the target's head")
    mark = arena.mark()
    normed = arena.take(out.shape[0], batch.final.shape[1], dtype=out.dtype)
    target_normed(batch, plan, head, normed, ops)
    torch.mm(normed, head.rows.t(), out=out)
    if head.bias is not None or head.scale != 1.0 or head.softcap:
        for part in chunks(out.shape[0], 1024):
            wide = out[part].to(torch.promote_types(out.dtype, torch.float32))
            if head.bias is not None:
                wide = wide + head.bias
            wide = wide * head.scale
            out[part] = torch.tanh(wide / head.softcap) * head.softcap if head.softcap else wide
    arena.release(mark)


def target_normed(batch: StepBatch, plan: Plan, head: TargetHead | None, out: Tensor, ops: ModuleType) -> None:
    """Final states of plan.teachers under the target's final norm; as they are without a head."""
    assert batch.final is not None
    if head is None:
        out.copy_(batch.final[plan.teachers])
    else:
        ops.norm_fwd(batch.final, head.norm_weight, head.eps, out, plan.teachers)


@dataclass
class LossInputs:
    """What the pass reads: states [K*R, H] before the final norm, or after it (`normed`, with norm_output); teacher
    logits [M, D], or probabilities and their entropy [M] (ops.settle)."""

    states: Tensor
    normed: Tensor | None
    teacher: Tensor
    entropy: Tensor | None
    goal: Tensor
    weight: Tensor


def loss_pass(
    x: LossInputs,
    plan: Plan,
    lm_head: Tensor,
    norm: Tensor,
    eps: float,
    lm_head_grad: Tensor,
    norm_grad: Tensor,
    dstates: Tensor,
    figures: Tensor,
    accumulate: bool,
    chunk_bytes: int,
    ops: ModuleType,
    arena: Arena,
) -> None:
    """Fills dstates [K*R, H] (gradient of `normed` if that is given, else of `states`) where pairs count, figures
    [3, K*R], lm_head_grad (added to with `accumulate`), and adds to norm_grad [H]."""
    D, H = lm_head.shape
    kept = {"dtype": lm_head.dtype}
    settled = () if x.entropy is None else (x.entropy,)
    beta = 1 if accumulate else 0
    for part in chunks(len(plan.slot), chunk_bytes // (D * lm_head.element_size())):
        mark = arena.mark()
        n = part.stop - part.start
        index = None if plan.losses is None else plan.losses[part]
        rows = part if index is None else slice(None)
        states, grads = x.states[rows], dstates[rows]
        if x.normed is None:
            hidden = arena.take(n, H, **kept)
            ops.norm_fwd(states, norm, eps, hidden, index)
        else:
            hidden = x.normed[part] if index is None else x.normed[index]
        logits = torch.mm(hidden, lm_head.t(), out=arena.take(n, D, **kept))
        at = torch.arange(part.start, part.stop, device=logits.device) if index is None else index
        ops.soft_ce(logits, x.teacher, plan.slot[part], x.goal[part], x.weight[part], figures, at, *settled)
        lm_head_grad.addmm_(logits.t(), hidden, beta=beta)
        beta = 1
        if x.normed is None:
            dhidden = torch.mm(logits, lm_head, out=hidden)
            ops.norm_bwd(dhidden, states, norm, eps, grads, norm_grad, index=index)
        elif index is None:
            torch.mm(logits, lm_head, out=grads)
        else:
            grads.index_copy_(0, index, torch.mm(logits, lm_head))
        arena.release(mark)
