"""draftsmith's runtime plugin for vLLM: mends known engine faults, widens the EAGLE-3 model-type list, gives target
classes the EAGLE-3 interface, and hands out hidden states.

vLLM calls `register` once in every process (front end, engine core, workers; vllm/plugins/__init__.py). Nothing is
changed on a release outside `KNOWN`, nor where the installed source does not prove the fault. Loading imports no
torch; what needs it runs when the engine has imported it anyway.

DRAFTSMITH_VLLM_FEATURES  what to do, of "mends", "gate", "states", "interface" (comma separated; unset: all; empty:
                          nothing)
DRAFTSMITH_VLLM_TARGETS   text model types that the list shall take even where the class lacks the interface
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

VERSION = "0.1.0"
NAME = "draftsmith_vllm"
FEATURES_VARIABLE = "DRAFTSMITH_VLLM_FEATURES"
TARGETS_VARIABLE = "DRAFTSMITH_VLLM_TARGETS"
KNOWN = ((0, 10, 1), (0, 33))
"""First and last release (inclusive; the last one with all its patch releases) whose source was read."""

# A child of vLLM's own logger, so that the lines appear in its format and at its level.
logger = logging.getLogger("vllm.draftsmith_vllm")


def numbers(version: str) -> tuple[int, ...] | None:
    """(0, 32, 0) of "0.32.0+cpu"; None of "dev" and the like."""
    parts: list[int] = []
    for word in version.split("+")[0].split(".")[:3]:
        digits = word[: len(word) - len(word.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
        if digits != word:
            break
    return tuple(parts) if len(parts) >= 2 and any(parts) else None


def is_known(version: str) -> bool:
    found = numbers(version)
    return found is not None and KNOWN[0] <= found and found[: len(KNOWN[1])] <= KNOWN[1]


def _mends(version: str) -> None:
    from .mends import apply_all

    apply_all(version)


def _gate(version: str) -> None:
    from .gate import install

    install()


def _states(version: str) -> None:
    from .states import install

    install()


def _interface(version: str) -> None:
    from .shim import install

    install()


FEATURES: dict[str, Callable[[str], None]] = {
    "mends": _mends,
    "gate": _gate,
    "states": _states,
    "interface": _interface,  # after "states", whose setup it goes before
}
"""What the plugin can do, in this order."""


def wanted() -> list[str]:
    """Features asked for by the environment; unknown words are reported, not guessed."""
    raw = os.environ.get(FEATURES_VARIABLE)
    if raw is None:
        return list(FEATURES)
    words = [w.strip() for w in raw.split(",") if w.strip()]
    for word in words:
        if word not in FEATURES:
            logger.warning("%s: %s names %r; known are %s", NAME, FEATURES_VARIABLE, word, ", ".join(FEATURES))
    return [f for f in FEATURES if f in words]


def engine_version() -> str:
    """The installed vLLM's version, of its own _version.py (no import of torch)."""
    import sys

    module = sys.modules.get("vllm.version") or sys.modules.get("vllm._version")
    found = getattr(module, "__version__", None)
    if isinstance(found, str):
        return found
    from importlib import import_module

    try:
        return str(import_module("vllm._version").__version__)
    except (ImportError, AttributeError):
        return "unknown"


def register() -> None:
    """The entry point; may be called several times in one process."""
    version = engine_version()
    if not is_known(version):
        logger.warning(
            "%s %s does not know vLLM %s (it knows %s to %s): nothing is changed",
            NAME,
            VERSION,
            version,
            ".".join(map(str, KNOWN[0])),
            ".".join(map(str, KNOWN[1])),
        )
        return
    for feature in wanted():
        FEATURES[feature](version)
