"""The training objective, in plain autograd: K unrolled draft steps (training-time test, EAGLE-3 paper, section 3.2).

Alignment. Row t sees the target's aux states of token t and the embedding of token t+1, and predicts token t+2; its
teacher is the target's distribution after token t+1. Step s shifts embedding, rope position and teacher by s, takes
the row's own state of step s-1 instead of aux states, and its row t attends to the step-0 keys up to t (same
document) and to its own keys of steps 1…s. Tokens are teacher-forced: in the engine a later draft step counts only if
all earlier tokens were accepted, i.e. equal the target's.

Which rows count at step s: those whose predicted token t+2+s is an answer token of the same document, whose teacher
state exists, and whose full-vocabulary argmax lies in the draft vocab. The last: where the target's first choice
cannot be drafted, the engine will reject whatever is proposed, so a teacher renormalised over the rest would only
teach how to be rejected.

Loss = Σ_s w_s · Σ_rows CE(teacher, drafter) / n_s, with n_s the rows that count at step s *in the whole optimizer
step*: over all packed sequences, accumulation parts and ranks (`counts`). So neither padding nor how rows are split
over batches or ranks changes it. CE is taken in float32 (or float64) over the D draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftsmith.drafter.attention import SharedSpans, Spans
from draftsmith.drafter.model import Drafter, Steps
from draftsmith.drafter.norm import rms_norm
from draftsmith.train.batch import StepBatch


@dataclass(frozen=True)
class TargetHead:
    """What turns the target's last state into its logits over the draft vocab: final norm weight [G] and eps, the
    lm_head rows of the draft vocab [D, G] in draft order, their bias [D], a scale, a soft cap (tanh)."""

    norm_weight: Tensor
    eps: float
    rows: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, final: Tensor) -> Tensor:
        """State before the final norm [N, G] → logits over the draft vocab [N, D], float32 or better."""
        normed = rms_norm(final, self.norm_weight, self.eps)
        out = normed @ self.rows.t()
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        if self.bias is not None:
            out = out + self.bias
        out = out * self.scale
        return torch.tanh(out / self.softcap) * self.softcap if self.softcap else out

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TargetHead:
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return TargetHead(
            self.norm_weight.to(device, dtype), self.eps, self.rows.to(device, dtype), bias, self.scale, self.softcap
        )


@dataclass(frozen=True)
class StepStats:
    """Per draft step, all [K]: rows that counted; their summed cross-entropy; how often the drafter's first choice
    was the target's. `entropy` is the teacher's own summed cross-entropy: ce - entropy is the KL divergence."""

    count: Tensor
    ce: Tensor
    top1: Tensor
    entropy: Tensor


def shift(x: Tensor, by: int, fill: float) -> Tensor:
    """y[t] = x[t + by]; `fill` where that is past the end."""
    out = torch.full_like(x, fill)
    if by < x.shape[0]:
        out[: x.shape[0] - by] = x[by:]
    return out


def supervision(batch: StepBatch, t2d: Tensor, steps: int) -> Tensor:
    """bool [K, T]: the row counts at that step."""
    known = batch.argmax >= 0
    teachable = batch.final_valid & known & t2d[batch.argmax.clamp_min(0)] & (batch.doc >= 0)
    own = torch.ones_like(known) if batch.context is None else batch.context.own(known.device)
    rows = []
    for s in range(steps):
        same = own & (shift(batch.doc, s + 2, -1) == batch.doc)
        rows.append(same & shift(batch.answer, s + 2, 0) & shift(teachable, s + 1, 0))
    return torch.stack(rows)


def spans_of(batch: StepBatch) -> Spans | SharedSpans:
    """What attention is bound to: the batch's documents, or those that ranks share."""
    if batch.context is None:
        return batch.spans
    from draftsmith.train.fused.context import ContextSpans

    return ContextSpans(batch.context, batch.token_ids.device)


def teacher(batch: StepBatch, rows: Tensor, head: TargetHead | None, D: int) -> Tensor:
    """The target's distribution over the D draft tokens after the tokens `rows` (int64 [N]) → [N, D], float32 or
    better. Of a shortened teacher (top k), the mass of all tokens not kept is spread over them evenly."""
    if batch.topk is not None:
        ids, logits, rest = (x[rows] for x in batch.topk)
        wide = torch.promote_types(logits.dtype, torch.float32)
        logits, rest = logits.to(wide), rest.to(wide)
        total = torch.logaddexp(logits.logsumexp(-1), rest)
        others = (rest - total).exp() / max(D - ids.shape[1], 1)
        return others[:, None].expand(-1, D).scatter(1, ids, (logits - total[:, None]).exp())
    if batch.final is None or head is None:
        raise ValueError("a batch without stored top-k logits needs final states and the target's head")
    return head.logits(batch.final[rows]).softmax(-1)


def step_weights(decay: float, steps: int) -> list[float]:
    """decay^s for s = 0…K-1."""
    return [decay**s for s in range(steps)]


def draft_step(
    model: Drafter, batch: StepBatch, s: int, rows: Tensor, p: Tensor, state: Tensor, *kv: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draft step s of all rows, and the cross-entropy of those that count.

    rows int64 [N]; p [N, D] their teacher; state [T, H]; kv: keys of steps 0…s-1, then their values → (summed CE,
    first choices int64 [N], next state, this step's keys and values)."""
    seen = Steps(spans_of(batch), list(kv[:s]), list(kv[s:]))
    embedding = model.embed(shift(batch.token_ids, s + 1, 0))
    normed, after = model.step(state, embedding, batch.position + s, seen)
    logits = model.lm_head(normed[rows])
    ce = -(p * logits.to(p.dtype).log_softmax(-1)).sum()
    return ce, logits.detach().argmax(-1), after, seen.keys[s], seen.values[s]


def reference_loss(
    model: Drafter,
    batch: StepBatch,
    K: int,
    weights: Sequence[float],
    head: TargetHead | None,
    counts: Tensor | None = None,
    recompute: bool = False,
) -> tuple[Tensor, StepStats]:
    """The loss (scalar, differentiable) and its figures.

    weights: w_s, at least K of them. counts: n_s [K] of the whole optimizer step; None = of this batch.
    recompute: keep only the states between draft steps and compute the rest again in the backward pass."""
    mask = supervision(batch, model.t2d, K)
    own = mask.sum(1)
    divisor = (own if counts is None else counts).clamp_min(1)

    # teacher rows of all steps lie on t+1+s: make each distribution once, whatever number of steps uses it
    index = torch.arange(batch.tokens, device=mask.device)
    needed = torch.zeros(batch.tokens, dtype=torch.bool, device=mask.device)
    for s in range(K):
        needed[index[mask[s]] + s + 1] = True
    with torch.no_grad():
        p = teacher(batch, needed.nonzero()[:, 0], head, model.config.draft_vocab_size)
        entropy = -torch.special.xlogy(p, p).sum(-1)
        slot = needed.long().cumsum(0) - 1

    state = model.fuse(batch.aux)
    steps = Steps(spans=spans_of(batch))
    loss = state.new_zeros((), dtype=torch.promote_types(state.dtype, torch.float32))
    figures: list[tuple[Tensor, Tensor, Tensor]] = []
    for s in range(K):
        rows = mask[s].nonzero()[:, 0]
        at = slot[rows + s + 1]
        fixed, seen = (model, batch, s, rows, p[at]), (state, *steps.keys, *steps.values)
        if recompute:
            ce, first, state, k, v = checkpoint(draft_step, *fixed, *seen, use_reentrant=False)  # type: ignore[misc]
        else:
            ce, first, state, k, v = draft_step(*fixed, *seen)
        steps.keys.append(k)
        steps.values.append(v)
        loss = loss + weights[s] * ce / divisor[s]
        hits = model.draft_to_target(first) == batch.argmax[rows + s + 1]
        figures.append((ce.detach(), hits.sum(), entropy[at].sum()))
    columns = [torch.stack(c) for c in zip(*figures, strict=True)]
    return loss, StepStats(count=own, ce=columns[0], top1=columns[1], entropy=columns[2])
