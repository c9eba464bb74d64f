"""What one captured row gives the trainer: token ids, aux streams, and the teacher.

Shapes: T tokens of the row, A aux layers, G target hidden, M = T - final_start supervised positions, k kept logits.
The teacher at position t is the target's distribution of token t + 1. It is kept either as the final state (after the
last layer, before the final norm: bf16 [M, G]) or as the top k of the target's logits on the draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TopK:
    """The target's distribution on the draft vocab, shortened. ids int64 [M, k] are *draft* ids, logits float32 [M, k],
    descending; rest float32 [M] = log of the summed exp(logit) of all other draft tokens (-inf where there are none).

    Probabilities on the draft vocab: exp(logits - log_total), and exp(rest - log_total) for all others together."""

    ids: Tensor
    logits: Tensor
    rest: Tensor

    def cpu(self) -> TopK:
        return TopK(self.ids.cpu(), self.logits.cpu(), self.rest.cpu())

    @staticmethod
    def cat(parts: Sequence[TopK]) -> TopK:
        """Positions one after another."""
        return TopK(*(torch.cat([getattr(p, f) for p in parts]) for f in ("ids", "logits", "rest")))

    def log_total(self) -> Tensor:
        """float32 [M]: log-sum-exp over the whole draft vocab."""
        return torch.logaddexp(torch.logsumexp(self.logits, dim=-1), self.rest)


@dataclass(frozen=True)
class States:
    """One row. token_ids int64 [T]; aux bf16 [T, A, G], streams in the order of the contract's aux_layer_ids;
    final bf16 [M, G] (None where only `topk` is kept) for positions final_start … T-1; argmax int64 [M] = the
    target's most likely token after each of these positions; boundary = index of the first answer token. answer bool [T]:
    which tokens are supervised, where that is not simply all from the boundary on (imported rows of several turns)."""

    token_ids: Tensor
    boundary: int
    aux: Tensor
    final_start: int
    final: Tensor | None = None
    argmax: Tensor | None = None
    topk: TopK | None = None
    answer: Tensor | None = None

    @property
    def tokens(self) -> int:
        return int(self.token_ids.shape[0])

    def teacher(self) -> Tensor | TopK:
        """The final state bf16 [M, G], or the shortened distribution where the codec kept only that."""
        if self.topk is not None:
            return self.topk
        if self.final is None:
            raise ValueError("these states hold neither a final state nor top-k logits")
        return self.final

    def check_shapes(self, aux_layers: int | None = None) -> None:
        """ValueError where lengths disagree; names the tensor, so that a swapped axis is seen at once (H04)."""
        T, M = self.tokens, self.tokens - self.final_start
        if self.aux.dim() != 3 or self.aux.shape[0] != T:
            raise ValueError(f"aux has shape {tuple(self.aux.shape)}, want [{T} tokens, layers, hidden]")
        if aux_layers is not None and self.aux.shape[1] != aux_layers:
            raise ValueError(f"aux holds {self.aux.shape[1]} layers, want {aux_layers}")
        if not 0 <= self.final_start <= T:
            raise ValueError(f"final_start {self.final_start} is outside 0…{T}")
        if self.answer is not None and self.answer.shape[0] != T:
            raise ValueError(f"answer has {self.answer.shape[0]} positions, want {T}")
        topk = None if self.topk is None else self.topk.ids
        for name, t in (("final", self.final), ("argmax", self.argmax), ("topk", topk)):
            if t is not None and t.shape[0] != M:
                raise ValueError(f"{name} has {t.shape[0]} positions, want {M} ({T} tokens from {self.final_start})")
