"""What parity looks at: rows cut short (the engine's side writes its attention out), and the trainer's own checkpoint."""

from __future__ import annotations

from pathlib import Path

from draftsmith.diagnose.subject import SampleRow, Setup, Subject


def cut(row: SampleRow, tokens: int) -> SampleRow:
    """The row's first `tokens` tokens. The boundary stays: where it lies behind them all, only prompt is compared."""
    T = min(row.tokens, tokens)
    return SampleRow(row.row_id, row.source, row.token_ids[:T], row.boundary, row.streams[:, :T], row.argmax[:T])


def trained_setup(subject: Subject, folder: Path) -> Setup:
    """The trainer's checkpoint (native, before the export) as a setup: exporter and engine are then both on trial."""
    from draftsmith.dialects import foreign

    checkpoint = foreign.read(folder, aux_meaning="entering", target_layers=subject.num_layers)
    ids = tuple(sorted(checkpoint.config.aux_layer_ids or subject.setup().aux_ids))
    # The exported files hold bf16: what the cast costs is no disagreement, so the trainer's weights are cast as well.
    tensors = {
        n: t.to(subject.checkpoint.tensors[n].dtype) if n in subject.checkpoint.tensors else t
        for n, t in checkpoint.tensors.items()
    }
    return Setup(checkpoint.config, tensors, ids, tuple(range(len(ids))), subject.embedding)
