"""Stage `export`: the best checkpoint, in the dialect of the engine, in a folder whose name ends in -eagle3."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from draftsmith.contract import Contract, require_agreement
from draftsmith.dialects import native, vllm
from draftsmith.errors import UserError
from draftsmith.recipe import Recipe
from draftsmith.record import folder_hash
from draftsmith.stage import Run, Stage
from draftsmith.target.resolve import resolve_target


def export_name(recipe: Recipe) -> str:
    """The drafter folder's name. It ends in -eagle3: without a declared method vLLM decides by the path (P09)."""
    name = recipe.export.name or recipe.name
    return name if name.endswith("-eagle3") else f"{name}-eagle3"


def exported_folder(run: Run) -> Path:
    """Where `export` puts (or put) the drafter of this run."""
    return run.stage_dir("export") / export_name(run.recipe)


def _inputs(run: Run) -> dict[str, str]:
    return {"train": run.output_hash("train"), "name": export_name(run.recipe)}


def _work(run: Run, folder: Path) -> dict[str, Any]:
    if run.recipe.export.dialect != "vllm":
        raise UserError(
            f"export.dialect is {run.recipe.export.dialect!r}",
            "the road serves and measures in vLLM",
            "export as vllm, then `draftsmith convert` to the other dialect",
        )
    checkpoint = native.read(run.stage_dir("train") / "best")
    if checkpoint.contract is not None:
        require_agreement(checkpoint.contract, Contract.load(run.stage_dir("extract")), "the checkpoint", "the states")
    target = resolve_target(run.recipe.target)
    raw = json.loads((target / "config.json").read_text(encoding="utf-8"))
    tokens = {k: raw[k] for k in ("bos_token_id", "eos_token_id") if raw.get(k) is not None}
    out = folder / export_name(run.recipe)
    if out.exists():
        shutil.rmtree(out)
    written = vllm.write(checkpoint, out, run.recipe.export.dtype, tokens)
    run.ui.note(f"exported {written['tensors']} tensors to {out}, read back bit for bit")
    return {"folder": str(out), **written, "output_hash": folder_hash(out)}


STAGE = Stage("export", ("export",), _inputs, _work, resumable=False)
