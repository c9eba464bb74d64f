"""Acceptance without an engine: the engine's own walk over a text, simulated from the target's states.

The engine drafts from the last accepted token: it starts at the row before the answer's first token, proposes K
tokens, keeps those that agree with the target up to the first that does not, and starts again behind them. So the
rows from which it drafts are not all rows, but those that such a walk touches: averaging over all rows flatters
(by .04–.11 on SmolLM2). Under greedy decoding a proposal is accepted if and only if it is the target's first choice;
a choice outside the draft vocab can never be proposed and counts as a miss. Tokens are teacher-forced: a later
position counts only where all earlier ones were accepted, i.e. equal the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafter.model import Drafter, Steps
from draftsmith.train.batch import StepBatch
from draftsmith.train.context import Exchange, slice_pack
from draftsmith.train.objective import shift, spans_of


@dataclass
class Acceptance:
    """Counts of a walk. accepted[i]: drafts whose position i was accepted; tokens: generated tokens walked over."""

    accepted: list[int]
    drafts: int = 0
    tokens: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def per_position(self) -> list[float]:
        """accepted[i] / drafts, unconditional, as vLLM counts."""
        return [a / max(self.drafts, 1) for a in self.accepted]

    @property
    def conditional(self) -> list[float]:
        """accepted[i] / drafts whose earlier positions were all accepted."""
        before = [self.drafts, *self.accepted[:-1]]
        return [a / max(b, 1) for a, b in zip(self.accepted, before, strict=True)]

    @property
    def length(self) -> float:
        """1 + accepted / drafts."""
        return 1 + sum(self.accepted) / max(self.drafts, 1)

    @property
    def tokens_per_target_step(self) -> float:
        """tokens / (tokens - accepted)."""
        return self.tokens / max(self.tokens - sum(self.accepted), 1)

    def __iadd__(self, other: Acceptance) -> Acceptance:
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]
        self.drafts, self.tokens = self.drafts + other.drafts, self.tokens + other.tokens
        self.rows += other.rows
        return self

    def as_dict(self) -> dict[str, Any]:
        return {
            "acceptance_per_position": [round(p, 6) for p in self.per_position],
            "acceptance_conditional": [round(p, 6) for p in self.conditional],
            "acceptance_length": round(self.length, 6),
            "tokens_per_target_step": round(self.tokens_per_target_step, 6),
            "drafts": self.drafts,
            "tokens": self.tokens,
        }


def proposals(model: Drafter, batch: StepBatch, K: int) -> Tensor:
    """The drafter's first choice at every row and step, as target ids: int64 [K, T]; -1 at rows of the prompt. Of a
    slice (train/context.py), every rank of its group asks at once; what stands at halo rows means nothing."""
    wanted = (shift(batch.answer, 2, 0) & (shift(batch.doc, 2, -1) == batch.doc)).nonzero()[:, 0]
    out = torch.full((K, batch.tokens), -1, dtype=torch.int64, device=batch.token_ids.device)
    steps = Steps(spans=spans_of(batch))
    with torch.no_grad():
        state = model.fuse(batch.aux)
        for s in range(K):
            embedding = model.embed(shift(batch.token_ids, s + 1, 0))
            normed, state = model.step(state, embedding, batch.position + s, steps)
            for rows in wanted.split(1024):
                out[s, rows] = model.draft_to_target(model.lm_head(normed[rows]).argmax(-1))
    return out


def shared_proposals(model: Drafter, batch: StepBatch, K: int, exchange: Exchange) -> Tensor:
    """`proposals` of a whole pack, each rank working on its slice of it."""
    mine = slice_pack(batch, exchange, K + 1)
    assert mine.context is not None
    return mine.context.gather(proposals(model, mine, K).t())[: batch.tokens].t()


def agreement(batch: StepBatch, proposed: Tensor) -> Tensor:
    """int64 [T]: how many proposals of a row the engine would accept, one after another from the first."""
    K = proposed.shape[0]
    right = []
    for s in range(K):
        same = shift(batch.doc, s + 1, -1) == batch.doc
        right.append(same & (shift(batch.argmax, s + 1, -1) == proposed[s]) & (proposed[s] >= 0))
    return torch.stack(right).long().cumprod(0).sum(0)


def walk(accepted: list[int], boundary: int, tokens: int, K: int, past: int = 0) -> Acceptance:
    """The engine's walk over one text. accepted[t]: proposals from row t that it would accept; boundary: index of the
    answer's first token; tokens: length of the text. The last token ends the request: nothing is drafted after it.
    past: so many tokens that the target would have said next are known as well. The engine counts what it accepts of them
    in the last draft, though it is never output (vllm/v1/core/sched/scheduler.py counts before it cuts)."""
    found = Acceptance([0] * K, tokens=max(tokens - boundary, 0))
    t = boundary - 1
    while t + 1 < tokens - 1:
        n = min(accepted[t], tokens + past - t - 2)
        found.drafts += 1
        for i in range(n):
            found.accepted[i] += 1
        t += n + 1
    return found


def acceptance(model: Drafter, batches: Iterable[StepBatch], K: int, exchange: Exchange | None = None) -> Acceptance:
    """Walk every document of the batches. The model sees float states as they are given: scaled if it was trained so.
    exchange: ranks that share the work on every batch; all of them get the whole result."""
    total = Acceptance([0] * K)
    was_training = model.training
    model.eval()
    for batch in batches:
        proposed = proposals(model, batch, K) if exchange is None else shared_proposals(model, batch, K, exchange)
        counts = agreement(batch, proposed).tolist()
        answer = batch.answer.tolist()
        for start, stop in batch.spans:
            boundary = next((i for i in range(start, stop) if answer[i]), stop) - start
            if boundary:
                total += walk(counts[start:stop], boundary, stop - start, K)
    model.train(was_training)
    return total


def unigram_acceptance(batches: Iterable[StepBatch], t2d: Tensor) -> float:
    """Share of the held-out answer tokens that always proposing one and the same draft token would get right: what a
    drafter that reads nothing reaches."""
    counts: dict[int, int] = {}
    total = 0
    for batch in batches:
        valid = shift(batch.answer, 1, 0) & (batch.argmax >= 0)
        for token in batch.argmax[valid].tolist():
            counts[token] = counts.get(token, 0) + 1
            total += 1
    inside = [n for token, n in counts.items() if bool(t2d[token])]
    return max(inside, default=0) / max(total, 1)
