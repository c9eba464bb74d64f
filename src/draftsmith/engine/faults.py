"""Known faults of an installed engine, proved by its source: the plugin's table, read through any `Source`.

The table lies in the plugin (plugin_src/draftsmith_vllm/faults.py), since what it says there is mended in the engine's
own processes; here it is only asked.
"""

from __future__ import annotations

from draftsmith.engine.plugin_src.draftsmith_vllm.faults import FAULTS, Fault, Found, find_all, find_in
from draftsmith.engine.reader.source import Source

__all__ = ["FAULTS", "Fault", "Found", "faults_of", "find_in", "spoils"]


def spoils(found: str) -> str:
    """`Fault.spoils` of the fault that a row of `check` tells of ("cpu-expand-lost: …"); "" for any other text."""
    return next((f.spoils for f in FAULTS if f.id == found.partition(":")[0]), "")


def faults_of(source: Source, platform: str = "") -> list[Found]:
    """Every fault of the table that the source proves and that concerns `platform` ("cpu", "cuda", …; "" = not known,
    which leaves out faults of one platform)."""
    asked = tuple(f for f in FAULTS if f.platform in ("any", platform))

    def read(file: str) -> str | None:
        try:
            return source.read(file)
        except FileNotFoundError:
            return None

    return find_all(read, asked)
