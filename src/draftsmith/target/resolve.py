"""From what the recipe calls the target to a folder on this machine."""

from __future__ import annotations

from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.recipe import TargetSection

SMOLLM2, GEMMA3 = "smollm2", "gemma3-270m"


def named_target(name: str) -> Path | None:
    """The folder of 'smollm2' or 'gemma3-270m', fetched and converted where it is not there yet; None: another name."""
    if name.lower() == SMOLLM2:
        from draftsmith.target.smollm2 import smollm2_folder

        return smollm2_folder()
    if name.lower() == GEMMA3:
        from draftsmith.target.gemma3 import gemma3_folder

        return gemma3_folder()
    return None


def resolve_target(target: TargetSection, weights: bool = True) -> Path:
    """The target's folder: a folder as it is, 'smollm2' and 'gemma3-270m' fetched, a hub id downloaded (without `weights`
    only its config and tokenizer). A relative path counts from the current folder. UserError where there is none."""
    if named := named_target(target.model):
        return named
    path = Path(target.model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(
                f"{path} holds no config.json",
                "a target is a folder with config.json, tokenizer and safetensors",
                "give the model's own folder",
            )
        return path
    if path.exists():
        raise UserError(f"target {path} is a file", "", "give the folder that holds config.json, or a hub id")
    if path.is_absolute() or target.model.startswith((".", "~")) or target.model.count("/") != 1:
        raise UserError(
            f"no target at {target.model!r}",
            f"it is neither a folder nor a hub id (owner/name); relative paths count from {Path.cwd()}",
            "check the path; 'smollm2' fetches the demo's own target",
        )
    from draftsmith.target.hub import hub_snapshot

    return hub_snapshot(target.model, target.revision, weights)
