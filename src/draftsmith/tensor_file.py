"""Writing a safetensors file so that a kill or a full disk leaves the old file or the new one, never a part."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `path` by rename, synced. OSError where the disk is full or refuses (safetensors itself raises an error of
    its own kind there, which nothing would take for a full disk)."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = path.with_name(f".{path.name}.part")
    try:
        save_file({n: t.contiguous() for n, t in tensors.items()}, str(part), metadata)
        with part.open("rb") as f:
            os.fsync(f.fileno())
        part.replace(path)
    except BaseException as e:
        part.unlink(missing_ok=True)
        found = re.search(r"\(os error (\d+)\)", str(e)) if isinstance(e, SafetensorError) else None
        if found is None:
            raise
        number = int(found.group(1))
        raise OSError(number, os.strerror(number), str(path)) from None
