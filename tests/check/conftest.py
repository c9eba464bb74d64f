"""The tiny pair, the engine trees and the sparse models of tests/mutants, for the tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "mutants"))


@pytest.fixture(scope="session")
def engine_trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from engine_tree import write_engine

    root = tmp_path_factory.mktemp("engines")
    return {kind: write_engine(root / kind, kind) for kind in ("modern-v1", "modern-v2", "middle", "old")}
