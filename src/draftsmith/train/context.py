"""Context parallelism: several ranks share one packed sequence, each keeps a part of its positions.

At draft step s a row sees the step-0 keys of its document up to itself, and its own keys of the later steps. So the
step-0 keys and values are all that ranks exchange: gathered once per optimizer step, their gradient summed and handed
back once (fused/context.py). All else is local: norms, projections, MLP, lm_head, the keys of later steps.

The sequence is cut into 2n chunks of one size; rank r keeps chunks r and 2n-1-r. A row's attention costs as much as
there is before it, and this pair costs the same on every rank. Behind each chunk lies a halo: the next rows, which
belong to another rank. Step s reads tokens, targets and teacher states s+1 rows further on; the halo holds them, and
counts nowhere (`StepBatch.own`).

    local rows:  [chunk r | halo | chunk 2n-1-r | halo]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith.train.batch import PAD_DOC, StepBatch

Spans = tuple[tuple[int, int], ...]


class Exchange(Protocol):
    """The ranks of one context group."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    def gather(self, mine: Tensor, out: Tensor) -> None:
        """mine [r, *] of every rank, in rank order → out [count * r, *]; both contiguous."""
        ...

    def scatter_sum(self, parts: Tensor, out: Tensor) -> None:
        """parts [count * r, *] summed over the ranks; this rank's share → out [r, *]."""
        ...


@dataclass(frozen=True)
class GroupExchange:
    """Over a process group."""

    group: Any
    rank: int
    count: int

    def gather(self, mine: Tensor, out: Tensor) -> None:
        dist.all_gather_into_tensor(out, mine, group=self.group)

    def scatter_sum(self, parts: Tensor, out: Tensor) -> None:
        dist.reduce_scatter_tensor(out, parts, group=self.group)


@dataclass(frozen=True)
class Layout:
    """Where the rows of a sequence lie. chunk, halo: rows; tokens: of the sequence before it was filled up to
    2 * count * chunk; spans: its documents, in the whole sequence's rows."""

    exchange: Exchange
    chunk: int
    halo: int
    tokens: int
    spans: Spans

    @property
    def total(self) -> int:
        """Rows of the whole sequence."""
        return 2 * self.exchange.count * self.chunk

    @property
    def starts(self) -> tuple[int, int]:
        """First rows of this rank's chunks, in the whole sequence."""
        rank, count = self.exchange.rank, self.exchange.count
        return rank * self.chunk, (2 * count - 1 - rank) * self.chunk

    @property
    def rows(self) -> tuple[slice, slice]:
        """This rank's chunks in its local rows."""
        second = self.chunk + self.halo
        return slice(0, self.chunk), slice(second, second + self.chunk)

    @property
    def crossing(self) -> bool:
        """Whether any document lies in more than one chunk; if not, nothing is exchanged."""
        return any(start // self.chunk != (stop - 1) // self.chunk for start, stop in self.spans)

    def inside(self, start: int) -> Spans:
        """The documents of the chunk that begins at row `start`, cut to it and in its own rows."""
        cut = ((max(a, start) - start, min(b, start + self.chunk) - start) for a, b in self.spans)
        return tuple((a, b) for a, b in cut if a < b)

    def before(self, start: int) -> tuple[int, int, int] | None:
        """Of a document that began before the chunk at `start` and goes on in it: (its rows in the chunk, first row in
        the whole sequence, `start`)."""
        for a, b in self.spans:
            if a < start < b:
                return min(b - start, self.chunk), a, start
        return None

    def own(self, device: torch.device | str) -> Tensor:
        """bool [local rows]: rows that are this rank's, not halo."""
        mask = torch.zeros(2 * (self.chunk + self.halo), dtype=torch.bool, device=device)
        for rows in self.rows:
            mask[rows] = True
        return mask

    def gather(self, local: Tensor) -> Tensor:
        """[local rows, *] of every rank → [total, *]."""
        count, size = self.exchange.count, self.chunk
        first, second = (local[rows].contiguous() for rows in self.rows)
        out = local.new_empty(self.total, *local.shape[1:])
        self.exchange.gather(first, out[: count * size])
        swapped = torch.empty_like(out[: count * size])
        self.exchange.gather(second, swapped)
        for rank, place in self._second_half():
            out[place] = swapped[rank * size : (rank + 1) * size]
        return out

    def scatter_sum(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """[total, *] of every rank, summed → this rank's chunks [chunk, *]."""
        count, size = self.exchange.count, self.chunk
        first, second = (whole.new_empty(size, *whole.shape[1:]) for _ in range(2))
        self.exchange.scatter_sum(whole[: count * size], first)
        swapped = torch.cat([whole[place] for _, place in self._second_half()])
        self.exchange.scatter_sum(swapped, second)
        return first, second

    def _second_half(self) -> Iterator[tuple[int, slice]]:
        """(rank, rows of its second chunk in the whole sequence), in rank order."""
        count = self.exchange.count
        for rank in range(count):
            at = (2 * count - 1 - rank) * self.chunk
            yield rank, slice(at, at + self.chunk)


def slice_pack(batch: StepBatch, exchange: Exchange, halo: int, multiple: int = 1) -> StepBatch:
    """This rank's part of a whole pack. halo: K + 1 or more; multiple: of a chunk's rows."""
    pieces = 2 * exchange.count
    chunk = -(-batch.tokens // (pieces * multiple)) * multiple
    layout = Layout(exchange, chunk, halo, batch.tokens, batch.spans)
    size = chunk + halo

    def cut(x: Tensor, fill: float) -> Tensor:
        out = x.new_full((2 * size, *x.shape[1:]), fill)
        for i, start in enumerate(layout.starts):
            part = x[start : start + size]
            out[i * size : i * size + len(part)] = part
        return out

    spans = [
        (a + rows.start, b + rows.start)
        for start, rows in zip(layout.starts, layout.rows, strict=True)
        for a, b in layout.inside(start)
    ]
    return StepBatch(
        token_ids=cut(batch.token_ids, 0),
        aux=cut(batch.aux, 0),
        final=None if batch.final is None else cut(batch.final, 0),
        final_valid=cut(batch.final_valid, 0),
        argmax=cut(batch.argmax, -1),
        answer=cut(batch.answer, 0),
        doc=cut(batch.doc, PAD_DOC),
        position=cut(batch.position, 0),
        topk=None if batch.topk is None else tuple(cut(x, 0) for x in batch.topk),  # type: ignore[arg-type]
        spans=tuple(spans),
        context=layout,
    )
