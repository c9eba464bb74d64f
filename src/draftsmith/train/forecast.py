"""What the engine will accept, forecast from a checkpoint and states: the walk of validate.py on rows of one's choice.

`draftsmith bench` shows it beside what was measured; on texts that the engine wrote itself at temperature 0 the two
should differ by no more than .03 at any position (a larger difference is a difference between engine and trainer).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from draftsmith.drafter.model import Drafter
from draftsmith.train.checkpoint import load_drafter
from draftsmith.train.data import RowSource, read_pack
from draftsmith.train.validate import Acceptance, acceptance

if TYPE_CHECKING:
    from draftsmith.stage import Run


def packs(source: RowSource, row_ids: Sequence[str] | None, tokens: int) -> Iterator[list[str]]:
    """Row ids (None = all of the source) in packs of about `tokens` tokens, in the source's order."""
    wanted = None if row_ids is None else set(row_ids)
    pack: list[str] = []
    size = 0
    for e in source.index:
        if wanted is not None and e.row_id not in wanted:
            continue
        if pack and size + e.tokens > tokens:
            yield pack
            pack, size = [], 0
        pack.append(e.row_id)
        size += e.tokens
    if pack:
        yield pack


def forecast_model(
    model: Drafter, source: RowSource, row_ids: Sequence[str] | None, steps: int, pack_tokens: int = 2048
) -> Acceptance:
    """The walk of a model that takes unscaled states (a checkpoint's), over rows of a source."""
    weight = model.fc.weight
    longest = max((e.tokens for e in source.index), default=pack_tokens)
    batches = (
        read_pack(source, p, max(longest, pack_tokens), None, weight.dtype, pad=False).to(weight.device)
        for p in packs(source, row_ids, pack_tokens)
    )
    return acceptance(model, batches, steps)


def forecast(
    checkpoint: Path, target: Path, source: RowSource, row_ids: Sequence[str] | None, steps: int
) -> Acceptance:
    """Forecast of a native checkpoint folder. target: the target's folder (its embedding is lent to the drafter);
    source: a states store, or live states; row_ids: None = all; steps: drafted tokens.

    The result's `per_position`, `length` and `tokens_per_target_step` are what the engine should show."""
    from draftsmith.target.weights import read_embedding

    model = load_drafter(checkpoint, read_embedding(target).float())
    if torch.cuda.is_available():
        model = model.cuda()
    return forecast_model(model, source, row_ids, steps)


def forecast_texts(run: Run, texts: Iterable[tuple[str, Sequence[int], int]], steps: int) -> Acceptance:
    """Forecast of a run's best checkpoint on texts whose states are not stored, e.g. the bench's own greedy answers.

    texts: (row id, token ids of prompt and answer, index of the answer's first token); states are made now."""
    import numpy as np

    from draftsmith.contract import Contract
    from draftsmith.extract.rows import Item
    from draftsmith.extract.source import LiveStates, TransformersBackend
    from draftsmith.target.resolve import resolve_target

    contract = Contract.load(run.stage_dir("extract"))
    backend = TransformersBackend(run, contract, None)
    items = [Item(name, np.asarray(ids, dtype=np.int32), boundary) for name, ids, boundary in texts]
    source = LiveStates(items, backend, contract, run.recipe.extract.batch_tokens)
    return forecast(run.stage_dir("train") / "best", resolve_target(run.recipe.target), source, None, steps)
