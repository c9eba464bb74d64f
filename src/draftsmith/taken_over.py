"""What a run takes over from the drafter that it starts from (train.from) before anything is trained: the draft vocab and
the aux layers, where the recipe does not choose its own. Both are what its weights were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UserError
from draftsmith.record import folder_hash

if TYPE_CHECKING:
    from draftsmith.dialects.checkpoint import Checkpoint
    from draftsmith.recipe import Recipe


def vocab_start(recipe: Recipe) -> Path | None:
    """The folder whose draft vocab is kept; None where the answers choose one."""
    return _folder(recipe) if recipe.vocab.size is None else None


def layers_start(recipe: Recipe) -> Path | None:
    """The folder whose aux layers are taken; None where the recipe or the default says them."""
    return _folder(recipe) if recipe.extract.aux_layers is None else None


def _folder(recipe: Recipe) -> Path | None:
    return Path(recipe.train.from_).expanduser() if recipe.train.from_ else None


def hashed(start: Path | None) -> dict[str, str]:
    """What a stage's inputs hold of the start."""
    return {"from": folder_hash(start)} if start is not None else {}


def _read(folder: Path, target_layers: int) -> Checkpoint:
    from draftsmith.dialects.foreign import read

    return read(folder, target_layers=target_layers)


def draft_ids(folder: Path, target_layers: int, vocab_size: int) -> list[int]:
    """Target ids that the drafter can propose. UserError where it was made for another vocabulary."""
    found = _read(folder, target_layers)
    if found.config.vocab_size != vocab_size:
        raise UserError(
            f"{folder} was made for a vocabulary of {found.config.vocab_size:,} tokens; the target has {vocab_size:,}",
            "its draft vocab names other tokens",
            "it is another target's drafter",
        )
    d2t: Any = found.tensors["d2t"]
    return [i + int(offset) for i, offset in enumerate(d2t.tolist())]


def aux_layers(folder: Path, target_layers: int) -> list[int] | None:
    """The drafter's aux layers in our meaning (id k = stream entering layer k); None where it does not say."""
    return _read(folder, target_layers).config.aux_layer_ids
