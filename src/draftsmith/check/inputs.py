"""What the user typed, turned into folders and parsed configs; every fault is a UserError with a fix.

A hub id is looked up in the local hub cache only (models--owner--name/{refs/main, snapshots/REV}): a check fetches
nothing and runs nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError, nearest

MAX_CONFIG = 32_000_000
"""Bytes of a config.json; the largest published ones are under 1 MB."""


def hub_cache() -> Path:
    """Where the hub's client keeps what it fetched."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"


def cached_snapshot(model_id: str) -> Path | None:
    """The newest local snapshot of a hub id, or None."""
    root = hub_cache() / ("models--" + model_id.replace("/", "--"))
    try:
        revision = (root / "refs" / "main").read_text(encoding="utf-8").strip()
        if revision and (found := root / "snapshots" / revision).is_dir():
            return found
        all_of_them = sorted((root / "snapshots").iterdir(), key=lambda p: p.stat().st_mtime)
    except (OSError, ValueError):
        return None
    return all_of_them[-1] if all_of_them else None


def model_folder(text: str, what: str) -> Path:
    """The folder of a target or drafter (`what`): a folder, its config.json, or a hub id that is in the local cache."""
    if not text.strip() or "\0" in text:
        raise UserError(f"the {what} is empty", "", f"give the folder of the {what}")
    path = Path(text).expanduser()
    if what == "target" and text.lower() in ("smollm2", "gemma3-270m") and not path.exists():
        from draftsmith.target.resolve import named_target

        if named := named_target(text):
            return named
    try:
        if path.is_dir():
            return _with_config(path, what)
        if path.is_file():
            if path.name == "config.json":
                return path.parent
            raise UserError(f"{what} {text} is a file", "", "give the folder that holds config.json")
    except OSError as e:
        raise UserError(f"{what} {text!r} cannot be opened: {e.strerror or e}", "", "check the path") from None
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        if found := cached_snapshot(text):
            return _with_config(found, what)
        raise UserError(
            f"{what} {text!r} is no folder here, and as a hub id it is not in the local cache ({hub_cache()})",
            "a check fetches nothing; an engine started offline would stop at the same point",
            f"download it first (hf download {text}), or give its folder",
        )
    parent = path.parent
    close = nearest(path.name, [p.name for p in parent.iterdir() if p.is_dir()]) if parent.is_dir() else []
    raise UserError(
        f"there is no {what} at {text}",
        "",
        f"did you mean {parent / close[0]}?" if close else f"check the path of the {what}",
    )


def _with_config(path: Path, what: str) -> Path:
    if (path / "config.json").is_file():
        return path
    if what == "drafter" and (path / "drafter.json").is_file():
        raise UserError(
            f"{path} is a draftsmith checkpoint, not an exported drafter",
            "no engine reads its drafter.json",
            f"draftsmith export {path} writes the folder that engines read; check that one",
        )
    below = sorted(p.parent.name for p in path.glob("*/config.json"))
    raise UserError(
        f"{path} holds no config.json",
        f"a {what} is a folder with config.json and safetensors",
        f"did you mean {path / below[0]}?" if below else f"give the {what}'s own folder",
    )


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object; UserError where the file is missing, too large, no JSON or no object."""
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG:
            raise UserError(f"{path} has {size:,} bytes", "a config is a few kB", "copy the folder again")
        # As every engine reads it: UTF-8, without a byte order mark.
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "", "copy the folder again") from None
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror or e}", "", "check its permissions") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is not JSON: {str(e)[:120]}", "", "copy the folder again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object", "", "copy the folder again")
    return value
