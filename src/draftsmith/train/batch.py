"""One packed sequence of training rows: what every form of the step (reference, fused) takes in.

T tokens of several documents one behind the other, optionally padded at the end. Index t of every field speaks of
token t: aux and final are the target's states *at* token t, argmax[t] is the token the target ranks first *after*
token t. The alignment (who sees what) is the objective's business, not the batch's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from draftsmith.train.context import Layout

PAD_DOC = -1


@dataclass(frozen=True)
class StepBatch:
    """token_ids int64 [T]; aux [T, A*G] (ascending layers side by side); final [T, G] state before the final norm,
    zeros where final_valid is False (None if the teacher is `topk`); argmax int64 [T] target's most likely next token
    in the full vocabulary, -1 where unknown (such rows are not supervised); answer bool [T]: the token is part of the
    answer; doc int32 [T]: document number, ascending, -1 for padding; position int64 [T] within the document;
    topk: the teacher shortened (extract/states.py TopK), stored instead of `final`: draft ids int64 [T, k], logits
    [T, k], rest [T] (log of the summed exp(logit) of all other draft tokens). spans: the documents as [start, stop).
    context: where several ranks share the sequence, which rows of it these are (context.py); None = all of it."""

    token_ids: Tensor
    aux: Tensor
    final: Tensor | None
    final_valid: Tensor
    argmax: Tensor
    answer: Tensor
    doc: Tensor
    position: Tensor
    topk: tuple[Tensor, Tensor, Tensor] | None = None
    spans: tuple[tuple[int, int], ...] = ()
    context: Layout | None = None

    def __post_init__(self) -> None:
        if not self.spans:
            object.__setattr__(self, "spans", document_spans(self.doc))

    @property
    def tokens(self) -> int:
        """Rows, padding included."""
        return self.token_ids.shape[0]

    @property
    def pack_tokens(self) -> int:
        """Rows of the whole sequence, whatever part of it this is."""
        return self.tokens if self.context is None else self.context.tokens

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> StepBatch:
        """On another device; floating fields as `dtype`. Copies from pinned memory do not block."""

        def move(value: Tensor) -> Tensor:
            return value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)

        changes: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                changes[f.name] = move(value)
        if self.topk is not None:
            changes["topk"] = tuple(move(x) for x in self.topk)
        return replace(self, **changes)


def document_spans(doc: Tensor) -> tuple[tuple[int, int], ...]:
    """Runs of equal document numbers as [start, stop), padding (-1) left out."""
    values = doc.tolist()
    spans, start = [], 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[start]:
            if values[start] != PAD_DOC:
                spans.append((start, i))
            start = i
    return tuple(spans)


def join(parts: list[StepBatch], pad_to: int | None = None) -> StepBatch:
    """Pack single documents (or packs) behind each other; documents are renumbered, padding comes last."""
    total = sum(p.tokens for p in parts)
    pad = max((pad_to or total) - total, 0)

    def cat(tensors: list[Tensor], fill: float) -> Tensor:
        tail = tensors[0].new_full((pad, *tensors[0].shape[1:]), fill)
        return torch.cat([*tensors, tail]) if pad else torch.cat(tensors)

    docs, next_doc = [], 0
    for p in parts:
        docs.append(torch.where(p.doc >= 0, p.doc + next_doc, p.doc))
        next_doc = max(next_doc, int(docs[-1].max()) + 1)
    fills = {"token_ids": 0, "aux": 0, "final_valid": 0, "argmax": -1, "answer": 0, "position": 0}
    merged: dict[str, Any] = {name: cat([getattr(p, name) for p in parts], fill) for name, fill in fills.items()}
    finals, topks = [p.final for p in parts if p.final is not None], [p.topk for p in parts if p.topk is not None]
    if len(finals) not in (0, len(parts)) or len(topks) not in (0, len(parts)):
        raise ValueError("batches with different teachers cannot be packed together")
    return StepBatch(
        **merged,
        final=cat(finals, 0) if finals else None,
        topk=tuple(cat([k[i] for k in topks], 0) for i in range(3)) if topks else None,  # type: ignore[arg-type]
        doc=cat(docs, PAD_DOC),
    )
