"""The model hub, where it answers: single files, whole snapshots, short time limits, one clear block when offline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError

PROBE_SECONDS = 4.0
SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
"""What a target needs besides its weights."""


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def token_headers() -> dict[str, str]:
    """The header that shows the hub who asks: from HF_TOKEN or huggingface_hub's own login; {} without one."""
    from huggingface_hub import get_token

    found = get_token()
    return {"Authorization": f"Bearer {found}"} if found else {}


def offline(model: str, reason: str) -> UserError:
    """The block for a hub id that cannot be fetched."""
    return UserError(
        f"{model!r} is no folder here, and the model hub does not answer for it: {reason}",
        "the target's config, tokenizer and weights are needed",
        "give the path of a folder that holds the model, check the spelling, or go online",
    )


def reachable(model: str, seconds: float = PROBE_SECONDS) -> str | None:
    """None if the hub has `model` and answers within `seconds`; else the reason."""
    import httpx

    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return "HF_HUB_OFFLINE is set"
    try:
        reply = httpx.get(
            f"{endpoint()}/api/models/{model}", timeout=seconds, follow_redirects=True, headers=token_headers()
        )
    except (httpx.HTTPError, OSError) as e:
        return f"{type(e).__name__} {e}".strip()
    return None if reply.status_code == 200 else f"status {reply.status_code}"


def _call(function: Any, model: str, **kwargs: Any) -> str:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:  # what was fetched before needs no network
        return str(function(model, local_files_only=True, **kwargs))
    except HFValidationError as e:
        raise offline(model, str(e)) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError):
        pass
    if reason := reachable(model):
        raise offline(model, reason)
    try:
        return str(function(model, **kwargs))
    except (HfHubHTTPError, OSError, ValueError) as e:
        raise offline(model, f"{type(e).__name__} {e}") from None


def hub_file(model: str, name: str, revision: str | None = None) -> Path:
    """Local path of one file of a hub model, downloaded if need be."""
    from huggingface_hub import hf_hub_download

    return Path(_call(hf_hub_download, model, filename=name, revision=revision))


def hub_snapshot(model: str, revision: str | None = None, weights: bool = True) -> Path:
    """Local folder of a hub model; without `weights` only config, tokenizer and templates."""
    from huggingface_hub import snapshot_download

    patterns = [*SMALL, "*.safetensors"] if weights else list(SMALL)
    return Path(_call(snapshot_download, model, revision=revision, allow_patterns=patterns))
