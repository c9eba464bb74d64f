"""What a diagnosis looks at: the drafter's files, the target's real states on a few rows, and what the run recorded.

The target is run over the sample once, keeping *every* residual stream, so that "what if another layer had been meant"
is a lookup. Shapes: n target layers, T tokens of a row, G target hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftsmith.contract import Contract
from draftsmith.dialects.checkpoint import Checkpoint
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter
from draftsmith.target.cache import cache_word
from draftsmith.train.batch import StepBatch

if TYPE_CHECKING:
    from draftsmith.engine.reader import EngineFacts


@dataclass(frozen=True)
class SampleRow:
    """One captured row and the target's own view of it. streams [n + 1, T, G]: id k = entering layer k, n = before the
    final norm; argmax int64 [T]: the target's most likely token after each position."""

    row_id: str
    source: str
    token_ids: list[int]
    boundary: int
    streams: Tensor
    argmax: Tensor

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Setup:
    """A drafter as it would be served: what a hypothesis changes. blocks: order in which the aux streams are joined
    (indices into aux_ids). own_embedding None = the target's is shared."""

    config: DrafterConfig
    tensors: dict[str, Tensor]
    aux_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    embedding: Tensor

    def with_config(self, **changes: Any) -> Setup:
        return replace(self, config=DrafterConfig.model_validate(self.config.model_dump() | changes))

    def with_norms(self, **changes: bool) -> Setup:
        return self.with_config(norms=self.config.norms.model_dump() | changes)

    def with_tensors(self, **changes: Tensor) -> Setup:
        return replace(self, tensors=self.tensors | changes)

    def module(self, into: Drafter | None = None) -> Drafter:
        """The drafter in float32, evaluating. into: a drafter of this very config that may be written over, since making
        one costs about as much as a draft step."""
        model = into or Drafter(self.config)
        tensors = {n: t.float() if t.is_floating_point() else t for n, t in self.tensors.items()}
        model.load_state_dict(tensors, assign=True)
        if not self.config.own_embedding:
            model.attach_embedding(self.embedding)
        return model.eval()

    def batch(self, row: SampleRow) -> StepBatch:
        """The row as this setup would see it."""
        ids = [self.aux_ids[b] for b in self.blocks]
        aux = torch.cat([row.streams[k].float() for k in ids], dim=-1)
        answer = torch.arange(row.tokens) >= row.boundary
        return StepBatch(
            token_ids=torch.as_tensor(row.token_ids),
            aux=aux,
            final=None,
            final_valid=torch.zeros(row.tokens, dtype=torch.bool),
            argmax=row.argmax,
            answer=answer,
            doc=torch.zeros(row.tokens, dtype=torch.int32),
            position=torch.arange(row.tokens),
        )


@dataclass
class Subject:
    """Everything that causes are looked for in."""

    drafter: Path
    target: Path
    checkpoint: Checkpoint
    rows: list[SampleRow]
    embedding: Tensor
    num_layers: int
    steps: int = 3
    contract: Contract | None = None
    states_folder: Path | None = None
    run_folder: Path | None = None
    train_rows: Sequence[SampleRow] = ()
    bench: dict[str, Any] | None = None
    facts: EngineFacts | None = None
    answer_tokens: int = 0
    """All that was captured; 0 = not known."""
    answer_spans: list[tuple[int, int]] = field(default_factory=list)
    """(boundary, length) of every captured row, tokens."""
    prompts: list[list[int]] = field(default_factory=list)
    """Token ids of the captured rows' prompts, or of some of them: enough to see how they begin and end."""
    notes: list[str] = field(default_factory=list)

    def setup(self) -> Setup:
        """The drafter as its files say."""
        config = self.checkpoint.config
        n = self.num_layers
        ids = tuple(config.aux_layer_ids or (2, n // 2, n - 3))
        # The engine sorts the ids and joins the streams in that order (interfaces.py: sorted(set(ids))).
        ordered = tuple(sorted(ids))
        return Setup(config, self.checkpoint.tensors, ordered, tuple(range(len(ordered))), self.embedding)


class Sampler:
    """The target, loaded once, and its view of rows. trust_remote_code: run the target's own code."""

    def __init__(self, target: Path, trust_remote_code: bool = False) -> None:
        from draftsmith.extract.transformers_backend import TransformersStates

        self.backend = TransformersStates(target, [0], trust_remote_code=trust_remote_code)

    def row(self, row: Any, max_tokens: int = 1 << 20) -> SampleRow | None:
        """`row` (row_id, source, token_ids, boundary), cut to `max_tokens`, with all streams in float32; None where fewer
        than 4 answer tokens are left."""
        ids = list(row.token_ids)[:max_tokens]
        if len(ids) < row.boundary + 4:
            return None
        streams = self.backend.all_streams(ids).float()
        return SampleRow(
            row.row_id, getattr(row, "source", ""), ids, row.boundary, streams, self.backend.tops(streams[-1])
        )

    @torch.no_grad()
    def continuation(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The target's next `count` greedy tokens."""
        from transformers import DynamicCache

        model: Any = self.backend.model
        given, out = torch.as_tensor([list(token_ids)]).to(self.backend.device), list[int]()
        kept: dict[str, Any] = {cache_word(model): DynamicCache(config=model.config)}
        for _ in range(count):
            found = model(input_ids=given, **kept, use_cache=True, logits_to_keep=1)
            out.append(int(found.logits[0, -1].argmax()))
            given = torch.as_tensor([out[-1:]]).to(self.backend.device)
        return out

    def rows(self, some: Sequence[Any], limit: int, max_tokens: int) -> list[SampleRow]:
        """Up to `limit` of the rows (see `row`)."""
        found = (self.row(row, max_tokens) for row in some[:limit])
        return [row for row in found if row is not None]
