"""What training writes: the native checkpoint of the best drafter, and the state from which a killed run goes on.

The resume state is one safetensors file with its JSON in the file's own header, replaced by rename: a kill at any
moment leaves the old state or the new one. No pickle. Several ranks write theirs by torch.distributed.checkpoint (whose
index is a pickle, read by dcp_reader.py), and any number of ranks reads either.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.contract import Contract
from draftsmith.drafter.model import Drafter
from draftsmith.errors import UserError
from draftsmith.record import read_json, write_json
from draftsmith.tensor_file import write_tensors

if TYPE_CHECKING:
    from draftsmith.train.core import Core
    from draftsmith.train.parallel import Ranks

RESUME = "resume.safetensors"
SHARDED = "resume.dcp."
FACTS = "facts.json"
_KEY = "draftsmith"


def folded(model: Drafter, rms: Tensor | None) -> dict[str, Tensor]:
    """The drafter's tensors as the engine must have them: float32 on the CPU, the channel scaling of the training
    input (aux / rms) folded into `fc`. d2t and t2d as they are."""
    tensors = {}
    # not state_dict(): under FSDP2 that would give every rank's part
    for name, value in [*model.named_parameters(), ("d2t", model.d2t), ("t2d", model.t2d)]:
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


def save_state(folder: Path, core: Core, ranks: Ranks, facts: dict[str, Any]) -> None:
    """Replace the resume state. facts: JSON-able. Several ranks write their parts together (DCP)."""
    if ranks.count > 1:
        _save_sharded(folder, core, ranks, facts)
        return
    tensors = {n: t.detach().cpu() for n, t in core.state().items()}
    write_tensors(folder / RESUME, tensors, {_KEY: json.dumps(facts, sort_keys=True)})


def _save_sharded(folder: Path, core: Core, ranks: Ranks, facts: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    part = folder / ".resume.dcp.part"
    if ranks.first:
        shutil.rmtree(part, ignore_errors=True)
    ranks.wait()
    dcp.save(core.state(), checkpoint_id=part)
    if ranks.first:
        write_json(part / FACTS, facts)
        final = folder / f"{SHARDED}{facts['packs']:09d}"
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for old in folder.glob(f"{SHARDED}*"):
            if old != final:
                shutil.rmtree(old)
    ranks.wait()


def _newest_sharded(folder: Path) -> Path | None:
    found = sorted(p for p in folder.glob(f"{SHARDED}*") if (p / FACTS).is_file())
    return found[-1] if found else None


def load_state(folder: Path, core: Core, ranks: Ranks) -> dict[str, Any] | None:
    """Copy the newest resume state into the core; returns its facts, None where there is none. Written by any number of
    ranks, read by any. UserError if it is damaged or of another drafter."""
    sharded, single = _newest_sharded(folder), read_resume(folder)
    packs = int(sharded.name.removeprefix(SHARDED)) if sharded else -1
    state = core.state()
    if sharded is not None and (single is None or packs > single[1]["packs"]):
        import torch.distributed.checkpoint as dcp

        from draftsmith.train.dcp_reader import CarefulReader

        dcp.load(state, storage_reader=CarefulReader(sharded), no_dist=ranks.count == 1)
        facts: dict[str, Any] = read_json(sharded / FACTS)
    elif single is None:
        return None
    else:
        tensors, facts = single
        wrong = sorted(set(tensors) ^ set(state)) or [n for n in state if tensors[n].shape != state[n].shape]
        if wrong:
            raise UserError(
                f"{folder / RESUME} is the state of another drafter or optimizer ({wrong[0]})",
                "training cannot go on from it",
                "remove it to begin the training stage anew",
            )
        with torch.no_grad():
            for name, value in state.items():
                value.copy_(_like(tensors[name], value))
    core.loaded()
    return facts


def _like(value: Tensor, live: Tensor) -> Tensor:
    """A whole tensor as the live one is laid out: its shards, if it is sharded."""
    if not hasattr(live, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(live.device), live.device_mesh, live.placements)  # type: ignore[attr-defined]


def read_resume(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The resume state that one process wrote, or None where there is none. UserError if it is damaged."""
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
