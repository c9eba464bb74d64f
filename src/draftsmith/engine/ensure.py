"""The engine that a demo uses: the one named, the managed one, or a fresh install; never the reference engine unasked."""

from __future__ import annotations

import platform
import sys

from draftsmith.engine.find import find_engine, managed_engines
from draftsmith.errors import UserError
from draftsmith.ui import Ui

REFERENCE = "reference"
"""engine.path of the built-in reference engine (engine/reference.py)."""

WHEEL_MACHINES = ("x86_64", "AMD64", "aarch64", "arm64")
"""Machines for which vLLM's Linux wheels exist."""


def vllm_exists_here() -> bool:
    """Whether any vLLM wheel can be installed on this platform at all."""
    return sys.platform == "linux" and platform.machine() in WHEEL_MACHINES


def ensure_engine(path: str | None, ui: Ui) -> str | None:
    """The engine path to put into the recipe: `path` if it holds an engine, None for the managed one (installed now if
    need be). Only where no vLLM wheel exists for the platform is it "reference", and that is said; a failed install
    raises."""
    if path == REFERENCE:
        ui.note("measuring with the built-in reference engine, as asked: acceptance is exact, speed is not vLLM's")
        return REFERENCE
    if path is not None:
        find_engine(path)
        return path
    if managed_engines():
        return None
    if not vllm_exists_here():
        ui.warn(f"no vLLM exists for {sys.platform} {platform.machine()}: measuring with the built-in reference engine")
        return REFERENCE
    from draftsmith.engine.install import install

    try:
        install(ui=ui)
    except UserError as e:
        e.fix = e.fix or "mend the install, or name your own environment with --engine"
        raise
    return None
