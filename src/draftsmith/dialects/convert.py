"""Converts a drafter folder: read strictly, decide about the embedding table, write, read back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from draftsmith.dialects import foreign, others
from draftsmith.dialects.checkpoint import Checkpoint
from draftsmith.errors import UserError


def convert_folder(
    source: Path,
    out: Path,
    to: str,
    *,
    target: Path | None = None,
    aux_layers: list[int] | None = None,
    aux_meaning: Any = None,
    allow_pickle: bool = False,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Convert `source` to dialect `to` in `out`; returns {"dialect", "notes", "sha256", "tensors", "cast"}.

    UserError (nothing written) where `out` has content, the source is not understood, or `to` cannot express it."""
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty", "old and new files would be mixed", "give a new folder")
    layers = None
    if target is not None:
        from draftsmith.target.config import target_facts

        layers = target_facts(target).num_layers
    checkpoint = foreign.read(
        source, allow_pickle=allow_pickle, aux_meaning=aux_meaning, aux_layers=aux_layers, target_layers=layers
    )
    if target is not None:
        _check_target(checkpoint, target)
        if to == "speculators":
            _lend_table(checkpoint, target)
    part = out.with_name(f".{out.name}.part")
    if part.exists():
        shutil.rmtree(part)
    try:
        written = others.write(to, checkpoint, part, dtype)
        if out.exists():
            out.rmdir()
        part.rename(out)
    finally:
        if part.exists():
            shutil.rmtree(part)
    return {"dialect": to, "notes": checkpoint.notes, **written}


def _check_target(checkpoint: Checkpoint, target: Path) -> None:
    """Vocabulary and width against the target; an embedding table equal to the target's is left out."""
    from draftsmith.target.config import target_facts
    from draftsmith.target.weights import read_embedding

    facts = target_facts(target)
    c = checkpoint.config
    if c.vocab_size != facts.vocab_size:
        raise UserError(
            f"the drafter's vocab_size is {c.vocab_size}, the target's {facts.vocab_size}",
            "it is the width over which the engine scatters the draft logits",
            "this drafter was made for another target, or its config is wrong (P13)",
        )
    if c.target_hidden_size != facts.hidden_size:
        raise UserError(
            f"fc takes states {c.target_hidden_size} wide, the target has {facts.hidden_size}",
            "",
            "another target's drafter",
        )
    own = checkpoint.tensors.get("embed_tokens.weight")
    if own is None:
        return
    theirs = read_embedding(target)
    if own.shape == theirs.shape and torch.equal(own.float(), theirs.float()):
        del checkpoint.tensors["embed_tokens.weight"]
        c.own_embedding = False
        checkpoint.notes.append("left out embed_tokens.weight: it equals the target's, which the engine shares")
    else:
        checkpoint.notes.append(
            "kept embed_tokens.weight: it differs from the target's, so it was trained (or is stale)"
        )


def _lend_table(checkpoint: Checkpoint, target: Path) -> None:
    """The target's embedding table among the tensors: speculators reads it from the target only where its own is NaN, and
    a table that is missing from the file may be any memory after its from_pretrained (seen with 0.9.0)."""
    from draftsmith.target.weights import read_embedding

    if "embed_tokens.weight" in checkpoint.tensors:
        return
    checkpoint.tensors["embed_tokens.weight"] = read_embedding(target).to(checkpoint.tensors["fc.weight"].dtype)
    checkpoint.config.own_embedding = True
    checkpoint.notes.append(
        "wrote the target's embed_tokens.weight beside: the speculators package may not load it itself"
    )
