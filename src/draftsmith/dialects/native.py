"""draftsmith's own checkpoint folder: drafter.json, model.safetensors, contract.json."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from draftsmith.contract import Contract
from draftsmith.dialects.checkpoint import (
    Checkpoint,
    load_tensors,
    require_inventory,
    require_map,
    save_tensors,
)
from draftsmith.drafter.config import FILE, WEIGHTS, DrafterConfig
from draftsmith.errors import UserError


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a native checkpoint; drafter.json last, so that a killed write is no checkpoint."""
    require_inventory(checkpoint.config, checkpoint.tensors, str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / WEIGHTS, checkpoint.tensors)
    if checkpoint.contract is not None:
        checkpoint.contract.save(folder)
    checkpoint.config.save(folder)


def read(folder: Path) -> Checkpoint:
    """Read a native checkpoint, strictly: UserError on anything missing, unexpected, misshapen or a wrong map."""
    try:
        config = DrafterConfig.load(folder)
    except FileNotFoundError:
        raise UserError(
            f"{folder / FILE} is missing",
            "this is not a native draftsmith checkpoint",
            "give the run's train/best folder",
        ) from None
    except (ValueError, ValidationError) as e:
        raise UserError(f"{folder / FILE} is not valid: {e}", "", "re-make the checkpoint") from None
    tensors = load_tensors(folder / WEIGHTS)
    require_inventory(config, tensors, str(folder / WEIGHTS))
    require_map(config, tensors, str(folder / WEIGHTS))
    contract = Contract.load(folder) if (folder / "contract.json").exists() else None
    return Checkpoint(config, tensors, contract)
