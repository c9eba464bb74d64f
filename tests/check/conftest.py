"""The engine trees of tests/mutants, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_tree import write_engine


@pytest.fixture(scope="session")
def engine_trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("engines")
    return {kind: write_engine(root / kind, kind) for kind in ("modern-v1", "modern-v2", "middle", "old")}
