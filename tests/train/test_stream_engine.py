"""`train --stream` from a real vLLM on the CPU: the store's own batches, no growth on disk, an engine killed in mid-stream."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.engine.find import Engine
from draftsmith.engine.process_guard import descendants
from draftsmith.extract import stage as extract
from draftsmith.extract import vllm_backend, wire
from draftsmith.extract.self_check import relative_l2
from draftsmith.pipeline import open_run
from draftsmith.recipe import load_recipe
from draftsmith.stage import Run, execute
from draftsmith.train.batch import StepBatch
from draftsmith.train.loop import Training
from draftsmith.train.stage import STAGE
from draftsmith.ui import QuietUi

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
STEPS, LIMIT = 24, 150_000
"""Packs of 64 tokens take 33 kB of states: the engine is at most four packs ahead of the trainer's reader, which has a few
of its own. So there is much to do still for the engine that takes a killed one's place."""


def open_with(recipe: Path, engine: Engine, out: Path, **changes: object) -> Run:
    settings = {
        "out": str(out),
        "engine.path": str(engine.python),
        "engine.max_model_len": 64,
        "extract.max_length": 60,
        "engine.dtype": "float32",
        "engine.args": ["--skip-tokenizer-init", "--max-num-seqs", "8"],
        "extract.backend": "vllm",
        "train.steps": STEPS,
        "train.eval_every": STEPS,
        "train.stream_buffer_gb": LIMIT / 1e9,
    }
    return open_run(load_recipe(recipe, settings | changes), QuietUi())


def folder_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def tiny_target(tiny_llama: Callable[..., Path]) -> Path:
    """The shared one's heads are 16 wide, which vLLM's attention on a CPU does not have."""
    return tiny_llama("target", head_dim=32)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[StepBatch]]:
    """train(run, at_step=…) → the batches that the trainer took; at_step(n) is called before each step."""
    inner = Training._one

    def train(run: Run, at_step: Callable[[int], object] = lambda n: None) -> list[StepBatch]:
        seen: list[StepBatch] = []

        def one(self: Training, batch: StepBatch) -> None:
            at_step(len(seen))
            seen.append(batch)
            inner(self, batch)

        monkeypatch.setattr(Training, "_one", one)
        execute(STAGE, run)
        return seen

    return train


def unscaled(aux: Tensor) -> Tensor:
    """Each channel over its own size in this pack: a stream scales channels by the held-out rows, all that it has
    before it begins, a store by the rows it trains on."""
    return aux.float() / aux.float().square().mean(0, keepdim=True).sqrt().clamp_min(1e-6)


def test_streams_from_a_real_engine_give_the_stores_batches(
    recipe: Path,
    real_engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    watched: Callable[..., list[StepBatch]],
) -> None:
    monkeypatch.setattr(wire, "RAM_FOLDER", tmp_path / "none")  # files of states lie in the run's folder, where we look
    made = Path(load_recipe(recipe).folder)
    outs = {name: tmp_path / name for name in ("stored", "memory", "disk")}
    for out in outs.values():
        shutil.copytree(made.parent, out)
        shutil.rmtree(out / made.name / "extract")
        (out / made.name / "extract").mkdir()
    stored = open_with(recipe, real_engine, outs["stored"])
    execute(extract.STAGE, stored)
    want = watched(stored)
    assert len(want) == STEPS

    servers = []
    start = vllm_backend.start

    def remember(*args: object, **kwargs: object) -> vllm_backend.VllmBackend:
        backend = start(*args, **kwargs)  # type: ignore[arg-type]
        servers.append(backend.server)
        return backend

    monkeypatch.setattr(vllm_backend, "start", remember)
    for kind in ("memory", "disk"):
        run = open_with(recipe, real_engine, outs[kind], **{"train.stream": kind})
        for name in ("contract.json", "run.json"):  # the stage is done; of its states nothing is here
            shutil.copy(stored.stage_dir("extract") / name, run.stage_dir("extract") / name)
        servers.clear()
        sizes: list[int] = []

        def at_step(n: int, kind: str = kind, run: Run = run, sizes: list[int] = sizes) -> None:
            sizes.append(
                folder_bytes(run.stage_dir("extract")) + sum(map(folder_bytes, run.stage_dir("train").glob("ring-*")))
            )
            if kind == "memory" and n == 2:
                for pid in descendants(servers[0]._guarded.pid):
                    os.kill(pid, signal.SIGKILL)

        got = watched(run, at_step)
        assert len(servers) == (2 if kind == "memory" else 1)  # the killed one was replaced
        assert len(got) == STEPS
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)  # each row once, in the store's order
            assert relative_l2(unscaled(a.aux), unscaled(b.aux)) < 1e-2  # bf16 of a batch of another shape
        logs = folder_bytes(run.stage_dir("extract")) - sum(
            p.stat().st_size for p in run.stage_dir("extract").glob("*.log")
        )
        assert max(sizes) < 4 * LIMIT + 200_000 and logs < 100_000  # logs and what is on its way, no states
        assert not list(run.stage_dir("train").glob("ring-*"))
        assert not list(run.stage_dir("extract").glob("draftsmith-states-*"))
