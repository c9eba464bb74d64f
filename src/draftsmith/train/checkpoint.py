"""What training writes: the native checkpoint of the best drafter, and the state from which a killed run goes on.

The resume state is one safetensors file with its JSON in the file's own header, replaced by rename: a kill at any
moment leaves the old state or the new one. No pickle.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.contract import Contract
from draftsmith.drafter.model import Drafter
from draftsmith.errors import UserError

RESUME = "resume.safetensors"
_KEY = "draftsmith"


def folded(model: Drafter, rms: Tensor | None) -> dict[str, Tensor]:
    """The drafter's tensors as the engine must have them: float32 on the CPU, the channel scaling of the training
    input (aux / rms) folded into `fc`. d2t and t2d as they are."""
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        tensors[name] = value.float() if value.is_floating_point() else value
    if rms is not None:
        tensors["fc.weight"] = tensors["fc.weight"] / rms.cpu().float()
    return {n: t.contiguous().clone() for n, t in tensors.items()}


def write_native(folder: Path, model: Drafter, rms: Tensor | None, contract: Contract) -> None:
    """Write the native checkpoint folder (drafter.json, model.safetensors, contract.json) in place of an older one."""
    from draftsmith.dialects import native
    from draftsmith.dialects.checkpoint import Checkpoint

    native.write(Checkpoint(model.config, folded(model, rms), contract), folder)


def load_drafter(folder: Path, embedding: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Drafter:
    """A native checkpoint as a module, strictly loaded. embedding: the target's table, where the drafter has none."""
    from draftsmith.dialects import native

    point = native.read(folder)
    model = Drafter(point.config)
    model.load_state_dict(point.tensors, strict=True)
    model = model.to(dtype)
    if embedding is not None and not point.config.own_embedding:
        model.attach_embedding(embedding.to(dtype))
    return model


def write_resume(folder: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Replace the resume state. facts: JSON-able."""
    part = folder / f".{RESUME}.part"
    unique = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    save_file(unique, part, metadata={_KEY: json.dumps(facts, sort_keys=True)})
    with part.open("rb") as f:
        os.fsync(f.fileno())
    part.replace(folder / RESUME)


def read_resume(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The resume state, or None where there is none. UserError if it is damaged."""
    path = folder / RESUME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as f:
            facts = json.loads(f.metadata()[_KEY])
            return {n: f.get_tensor(n) for n in f.keys()}, facts  # noqa: SIM118  (no dict)
    except (SafetensorError, OSError, KeyError, ValueError) as e:
        raise UserError(
            f"{path} cannot be read: {e}",
            "training cannot go on from it",
            "remove it to begin the training stage anew",
        ) from None
