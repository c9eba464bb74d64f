"""What a run takes over from the drafter that it starts from (train.from) before anything is trained: the draft vocab and
the aux layers, where the recipe does not choose its own. Both are what its weights were trained on."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.errors import UserError
from draftsmith.record import folder_hash

if TYPE_CHECKING:
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


@lru_cache(maxsize=4)
def _facts(folder: Path, target_layers: int) -> tuple[int, tuple[int, ...], tuple[int, ...] | None]:
    """(vocabulary, ids that it can propose, aux layers) of a drafter. Reading one reads its weights, and a stage asks for
    its contract several times."""
    from draftsmith.dialects.foreign import read

    found = read(folder, target_layers=target_layers)
    ids = tuple(i + int(offset) for i, offset in enumerate(found.tensors["d2t"].tolist()))
    layers = found.config.aux_layer_ids
    return found.config.vocab_size, ids, None if layers is None else tuple(layers)


def draft_ids(folder: Path, target_layers: int, vocab_size: int) -> list[int]:
    """Target ids that the drafter can propose. UserError where it was made for another vocabulary."""
    made_for, ids, _ = _facts(folder, target_layers)
    if made_for != vocab_size:
        raise UserError(
            f"{folder} was made for a vocabulary of {made_for:,} tokens; the target has {vocab_size:,}",
            "its draft vocab names other tokens",
            "it is another target's drafter",
        )
    return list(ids)


def aux_layers(folder: Path, target_layers: int) -> list[int] | None:
    """The drafter's aux layers in our meaning (id k = stream entering layer k); None where it does not say."""
    _, _, layers = _facts(folder, target_layers)
    return None if layers is None else list(layers)
