"""The train stage by several processes: torchrun's worker and Ray, on a run whose earlier stages are made by hand."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from draftsmith.capture.rows import Row, write_rows
from draftsmith.contract import Contract
from draftsmith.dialects import native
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.states import States
from draftsmith.extract.store import StateWriter
from draftsmith.pipeline import open_run
from draftsmith.recipe import load_recipe
from draftsmith.record import write_record
from draftsmith.stage import execute
from draftsmith.target.config import target_facts
from draftsmith.train.stage import STAGE
from draftsmith.ui import QuietUi
from draftsmith.vocab.map import VocabMap

V, D, H = 320, 64, 64


@pytest.fixture
def recipe(tiny_target, tmp_path):
    """A recipe whose run has capture, vocab and extract done, with random states."""
    path = tmp_path / "recipe.yaml"
    sections = {
        "name": "tiny",
        "out": str(tmp_path / "runs"),
        "target": {"model": str(tiny_target)},
        "capture": {"prompts": ["x.jsonl"]},
        "train": {"steps": 4, "batch_tokens": 64, "eval_every": 2, "ttt_steps": 2, "held_out_rows": 0.2},
    }
    path.write_text(yaml.safe_dump(sections))
    run = open_run(load_recipe(path), QuietUi())
    facts = Contract(target=target_facts(tiny_target), aux_layer_ids=[2, 4, 5], final_state="pre_norm")
    gen = torch.Generator().manual_seed(0)
    rows = []
    for i in range(16):
        length = int(torch.randint(12, 30, (1,), generator=gen))
        ids = torch.randint(V, (length,), generator=gen)
        rows.append((f"row-{i}", ids, 5))
    for name in ("capture", "vocab", "extract"):
        run.stage_dir(name).mkdir(parents=True)
        facts.save(run.stage_dir(name))
    write_rows(
        run.stage_dir("capture"),
        [Row(n, n, 0, 0, "x", ids.tolist(), b, "stop", "default", 0.7, 1.0, "t", "") for n, ids, b in rows],
    )
    t2d = np.arange(V) < D
    VocabMap(np.zeros(D, dtype=np.int64), t2d).save(run.stage_dir("vocab"))
    with StateWriter(run.stage_dir("extract"), facts, make_codec("bf16")) as writer:
        for name, ids, boundary in rows:
            n = len(ids)
            writer.add(
                name,
                States(
                    ids,
                    boundary,
                    torch.randn(n, 3, H, generator=gen).bfloat16(),
                    boundary - 1,
                    torch.randn(n - boundary + 1, H, generator=gen).bfloat16(),
                    torch.randint(D, (n - boundary + 1,), generator=gen),
                ),
            )
    for name in ("capture", "vocab", "extract"):
        write_record(
            run.stage_dir(name),
            stage=name,
            key=name,
            inputs={},
            config={},
            result={"output_hash": name},
            started=time.time(),
        )
    return path


def best_of(recipe):
    return Path(load_recipe(recipe).folder) / "train"


def test_the_stage_writes_a_checkpoint_that_reads_back_and_is_skipped_then(recipe):
    run = open_run(load_recipe(recipe), QuietUi())
    record = execute(STAGE, run)
    assert record["result"]["steps"] == 4
    found = native.read(best_of(recipe) / "best")
    assert found.contract.sizes.head_dim == 16
    assert found.contract.draft_vocab_size == D
    assert found.contract.ttt_steps == 2
    assert execute(STAGE, run)["skipped"]


@pytest.mark.slow
def test_two_processes_by_torchrun_finish_the_stage_once(recipe):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "draftsmith.train.worker", str(recipe)]
    for expected in ("done", "done"):  # the second time there is nothing to do
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        record = json.loads((best_of(recipe) / "run.json").read_text())
        assert record["status"] == expected
    assert record["result"]["packs"] == 8
    native.read(best_of(recipe) / "best")


@pytest.mark.slow
def test_two_workers_by_ray_finish_the_stage(recipe):
    pytest.importorskip("ray")
    code = (
        "import ray, sys; from pathlib import Path; from draftsmith.train.ray_runner import train_with_ray\n"
        "ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)\n"
        "print(train_with_ray(Path(sys.argv[1]), {}, 2)['status'])"
    )
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("done")
    native.read(best_of(recipe) / "best")
