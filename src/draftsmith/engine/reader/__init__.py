"""Reading an installed engine: facts with file and line, from its source by AST, without importing or running any of it.

facts = read_engine("/opt/venv/bin/python")
facts.version, facts.model_list, facts.supports("KimiK25ForConditionalGeneration")
"""

from __future__ import annotations

from pathlib import Path

from draftsmith.engine.reader.facts import EngineFacts
from draftsmith.engine.reader.located import Located, locate
from draftsmith.engine.reader.source import Source

__all__ = ["EngineFacts", "Located", "Source", "locate", "read_engine"]


def read_engine(path: str | Path, engine: str | None = None, platform: str | None = None) -> EngineFacts:
    """Facts about the engine at `path` (what `locate` accepts). Nothing is parsed yet; every fact is read on first use.

    platform: "cuda", "rocm", "xpu" or "cpu", where it should not be taken from the installation (a class may differ).
    """
    located = locate(path, engine)
    return EngineFacts(located, platform or "")
