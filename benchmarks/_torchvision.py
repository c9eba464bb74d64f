"""torchvision's Python part beside a CPU engine, for targets whose classes import it while only text is asked.

PyPI's builds link CUDA: their compiled operators do not load beside a CPU torch, and then the registration of those
operators' shapes stops the whole import. Without that one file the rest imports.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from draftsmith.target.packages import pip_download

MINOR_BEHIND_TORCH = 15
"""torch 2.13 goes with torchvision 0.28."""


def beside(torch: str, work: Path) -> Path:
    """A folder for the engine's path, made once below `work`. torch: the engine's torch version, "2.13.0+cpu"."""
    folder = work / "torchvision-python"
    if not (folder / ".complete").is_file():
        version = f"0.{int(torch.split('.')[1]) + MINOR_BEHIND_TORCH}.0"
        wheel = pip_download(f"torchvision=={version}", work / "wheels")
        with zipfile.ZipFile(wheel) as z:
            z.extractall(folder)
        (folder / "torchvision" / "_meta_registrations.py").write_text("")
        (folder / ".complete").touch()
    return folder
