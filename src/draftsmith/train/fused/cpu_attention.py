"""The step-0 part of the unrolled attention on a CPU, for the rows that count alone: matrix products of the library
around two compiled loops.

torch's own CPU kernel takes every row of a document and copies keys and values for each query head; prompts are most of
many documents. Here a block of active rows meets the keys up to its last row, the queries of one key head as one
matrix. Scores of one block exist at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftsmith.train.fused.arena import Arena
from draftsmith.train.fused.native import call

ROWS = 128
"""Query rows of a block: fewer leave products too small to be fast, more compute scores above the diagonal."""
CELLS = 1 << 22
"""Scores of a block over all heads, which bounds its memory at long contexts."""


class RowsCausal:
    """Same arguments as attention.CpuCausal, but queries, outputs and their gradients hold active rows: [R, n, d].

    active int64 [R] ascending; tokens: length of the packed sequence. Results and scratch are taken from the arena.
    Rows of no document give zeros."""

    B = 1

    def __init__(
        self,
        spans: tuple[tuple[int, int], ...],
        n: int,
        m: int,
        scale: float,
        active: Tensor | None,
        tokens: int,
        arena: Arena,
    ) -> None:
        self.n, self.m, self.scale, self.tokens, self.arena = n, m, scale, tokens, arena
        self.active = torch.arange(tokens) if active is None else active
        edges = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)
        first, last = torch.searchsorted(self.active, edges).unbind(1)
        self.blocks: list[tuple[int, int, int, int]] = []  # query rows i…j of the active ones, keys a…b
        for (start, stop), low, high in zip(spans, first.tolist(), last.tolist(), strict=True):
            size = max(8, min(ROWS, CELLS // (n * (stop - start))))
            for i in range(low, high, size):
                j = min(i + size, high)
                self.blocks.append((i, j, start, int(self.active[j - 1]) + 1))

    def _queries(self, x: Tensor) -> Tensor:
        """[r, n, d] → [m, r * n/m, d]: all that meets one key head."""
        r, n, d = x.shape
        out = self.arena.take(self.m, r, n // self.m, d, dtype=x.dtype)
        out.copy_(x.unflatten(1, (self.m, -1)).transpose(0, 1))
        return out.flatten(1, 2)

    def _bmm(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b, out=self.arena.take(*a.shape[:2], b.shape[2], dtype=a.dtype))

    def _rows(self, x: Tensor) -> Tensor:
        """Back: [m, r * n/m, d] → [r, m, n/m, d]."""
        return x.unflatten(1, (-1, self.n // self.m)).transpose(0, 1)

    def _sizes(self, i: int, j: int, a: int, b: int) -> tuple[int, ...]:
        return self.m, j - i, self.n // self.m, b - a, a, self.tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        """q [R, n, d], k and v [T, m, d] → output [R, n, d] and log-sum-exps [1, n, T], from the arena."""
        take = self.arena.take
        out, lse = take(*q.shape, dtype=q.dtype).zero_(), take(1, self.n, self.tokens, dtype=q.dtype).zero_()
        mark = self.arena.mark()
        for i, j, a, b in self.blocks:
            scores = self._bmm(self._queries(q[i:j]), k[a:b].permute(1, 2, 0))
            call("causal_fwd", q.dtype, *self._sizes(i, j, a, b), self.scale, scores, lse, self.active[i:j])
            mixed = self._bmm(scores, v[a:b].transpose(0, 1))
            out[i:j].unflatten(1, (self.m, -1)).copy_(self._rows(mixed))
            self.arena.release(mark)
        return out, lse, None

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q [R, n, d], k and v [T, m, d], from the arena, given the joined output and log-sum-exps."""
        take, d = self.arena.take, q.shape[2]
        dq = take(*q.shape, dtype=q.dtype).zero_()
        dk, dv = take(2, self.m, self.tokens, d, dtype=q.dtype).zero_().unbind(0)
        mark = self.arena.mark()
        for i, j, a, b in self.blocks:
            query, grad = self._queries(q[i:j]), self._queries(dout[i:j])
            scores = self._bmm(query, k[a:b].permute(1, 2, 0))
            dscores = self._bmm(grad, v[a:b].permute(1, 2, 0))
            call(
                "causal_bwd", q.dtype, *self._sizes(i, j, a, b), d, self.scale, scores, dscores, lse, out[i:j],
                dout[i:j], self.active[i:j],
            )  # fmt: skip
            dv[:, a:b].baddbmm_(scores.transpose(1, 2), grad)
            dk[:, a:b].baddbmm_(dscores.transpose(1, 2), query)
            dq[i:j].unflatten(1, (self.m, -1)).copy_(self._rows(self._bmm(dscores, k[a:b].transpose(0, 1))))
            self.arena.release(mark)
        return dq, dk.transpose(0, 1), dv.transpose(0, 1)
