"""A store written anew with another codec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.errors import UserError
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.head import WeightsHead
from draftsmith.extract.store import StateStore, StateWriter
from draftsmith.ui import Ui


def convert_store(
    source: Path,
    target: Path,
    codec: str,
    ui: Ui,
    *,
    vocab: Path | None = None,
    model: Path | None = None,
    topk: int = 128,
) -> dict[str, Any]:
    """Rows of `source` into `target`, in their order; a killed conversion goes on. vocab (folder of the draft vocab) and
    model (the target's folder) are needed for fp8-topk. Returns rows, bytes and bytes_before."""
    store = StateStore.open(source)
    head, params = None, None
    contract = store.contract
    if codec == "fp8-topk":
        if vocab is None or model is None:
            raise UserError(
                "codec fp8-topk needs the draft vocab and the target's folder",
                "the logits on the draft vocab are computed from the final states",
                "give --vocab and --model",
            )
        if store.codec.needs_topk:
            raise UserError(f"{source} keeps top-k logits already", "", "convert from bf16 or fp8 states")
        from draftsmith.vocab.map import VocabMap

        chosen = VocabMap.load(vocab)
        ids = torch.as_tensor(chosen.draft_to_target())
        head = WeightsHead(model, ids)
        params = {"k": topk, "draft_vocab_size": len(ids)}
        contract = contract.with_(vocab_map_hash=chosen.hash(), draft_vocab_size=len(ids))
    with (
        StateWriter(target, contract, make_codec(codec, params)) as writer,
        ui.task("states", store.tokens, "tok") as task,
    ):
        for entry in store.index:
            if entry.row_id not in writer.done:
                s = store.read_entry(entry)
                if head is not None and s.final is not None:
                    s = replace(s, topk=head.topk(s.final, topk))
                writer.add(entry.row_id, s)
            task.advance(entry.tokens)
    made = StateStore.open(target)
    return {"rows": len(made), "bytes": made.bytes, "bytes_before": store.bytes}
