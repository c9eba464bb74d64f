"""Training that goes on from an existing drafter (`--from`, any dialect).

The checkpoint's shape is the drafter's; its draft vocab is kept where the run's is the same, else its lm_head rows are
moved to the run's vocab, token by token, and the rows of new tokens are taken from the target at the same scale.
Whatever was patched on reading is said. The loop then measures acceptance before the first step: a start that was lost
on the way (another norm, other layers, another rope) shows there and not after hours.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftsmith.contract import Contract, require_agreement
from draftsmith.dialects.checkpoint import Checkpoint
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter
from draftsmith.errors import UserError
from draftsmith.recipe import DrafterSection
from draftsmith.train.objective import TargetHead

# fields that a start under other data or another vocab may change
_FREE = frozenset({"data_hash", "vocab_map_hash", "draft_vocab_size", "trained_length", "ttt_steps", "thinking"})
_GIVEN = ("form", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rope")


def read_start(folder: Path, contract: Contract, section: DrafterSection) -> Checkpoint:
    """The checkpoint of any dialect, if it fits these states and the recipe. UserError names what does not."""
    from draftsmith.dialects.foreign import read

    found = read(folder, target_layers=contract.target.num_layers)
    if found.contract is not None:
        require_agreement(contract, found.contract, "this run", str(folder), ignore=_FREE)
    config = found.config
    facts = {
        "aux layers": (config.aux_layer_ids, contract.aux_layer_ids),
        "target hidden size": (config.target_hidden_size, contract.target.hidden_size),
        "vocabulary": (config.vocab_size, contract.target.vocab_size),
    }
    for name, (theirs, ours) in facts.items():
        if theirs is not None and theirs != ours:
            raise UserError(
                f"{folder} was made for {name} {theirs}; the states here have {ours}",
                "its first matrix would read other numbers than it was trained on",
                "extract again with extract.aux_layers as the checkpoint has them, or start without it"
                if name == "aux layers"
                else "it is another target's drafter",
            )
    for name in _GIVEN:
        wanted = getattr(section, name)
        default = DrafterSection.model_fields[name].default
        if wanted != default and wanted != getattr(config, name):
            raise UserError(
                f"drafter.{name} is {wanted!r}, the checkpoint {folder} has {getattr(config, name)!r}",
                "a start keeps the shape that it was trained in",
                f"leave drafter.{name} out, or start without train.from",
            )
    return found


def moved_head(found: Checkpoint, d2t: Tensor, head: TargetHead) -> tuple[Tensor, str]:
    """lm_head rows [D, H] for the run's draft vocab d2t, and what was done in words.

    A token that the checkpoint could draft keeps its row. A new one gets the target's row (times its final norm), scaled
    to the mean length of the kept rows; UserError if the widths differ and there is no such row."""
    old_ids = torch.arange(len(found.tensors["d2t"])) + found.tensors["d2t"]
    new_ids = torch.arange(len(d2t)) + d2t
    weight = found.tensors["lm_head.weight"].float()
    if torch.equal(old_ids, new_ids):
        return weight, f"draft vocab kept: {len(new_ids):,} tokens"
    place = torch.full((found.config.vocab_size,), -1, dtype=torch.int64)
    place[old_ids] = torch.arange(len(old_ids))
    at = place[new_ids]
    fresh = at < 0
    out = weight[at.clamp_min(0)].clone()
    if bool(fresh.any()):
        rows = head.rows * head.norm_weight
        if rows.shape[1] != weight.shape[1]:
            raise UserError(
                f"{int(fresh.sum()):,} tokens of this run's draft vocab are not in the checkpoint's",
                f"their rows cannot be taken from the target: it is {rows.shape[1]} wide, the drafter {weight.shape[1]}",
                "keep the checkpoint's draft vocab (vocab stage)",
            )
        kept = weight if bool(fresh.all()) else out[~fresh]
        out[fresh] = rows[fresh] * (kept.norm(dim=1).mean() / rows.norm(dim=1).mean())
    gone = len(old_ids) - int((~fresh).sum())
    return out, (
        f"draft vocab changed: {int((~fresh).sum()):,} lm_head rows moved, {int(fresh.sum()):,} new ones from the "
        f"target, {gone:,} dropped"
    )


def drafter_from(
    found: Checkpoint, d2t: Tensor, t2d: Tensor, head: TargetHead, embedding: Tensor
) -> tuple[Drafter, list[str]]:
    """The drafter with the checkpoint's weights on the run's draft vocab (float32, CPU); strict; what was done.

    A table of its own that equals the target's is left out again; another one is kept and frozen."""
    notes = list(found.notes)
    tensors = {n: t for n, t in found.tensors.items() if n not in ("d2t", "t2d")}
    tensors["lm_head.weight"], said = moved_head(found, d2t, head)
    notes.append(said)
    changes: dict[str, object] = {"draft_vocab_size": len(d2t)}
    own = tensors.get("embed_tokens.weight")
    if own is not None and own.shape == embedding.shape and torch.equal(own.to(embedding.dtype), embedding):
        tensors.pop("embed_tokens.weight")
        changes["own_embedding"] = False
        notes.append("embed_tokens equals the target's: shared with it")
    config = DrafterConfig.model_validate(found.config.model_dump() | changes)
    model = Drafter(config)
    model.load_state_dict({n: t.float() for n, t in tensors.items()} | {"d2t": d2t, "t2d": t2d}, strict=True)
    if model.embed_tokens is not None:
        model.embed_tokens.weight.requires_grad_(False)
    else:
        model.attach_embedding(embedding.float())
    return model, notes
