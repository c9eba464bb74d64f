"""The train stage by several processes: torchrun's worker and Ray, on a run whose earlier stages are made by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.dialects import native
from draftsmith.pipeline import open_run
from draftsmith.recipe import load_recipe
from draftsmith.stage import execute
from draftsmith.train.stage import STAGE
from draftsmith.ui import QuietUi


def best_of(recipe):
    return Path(load_recipe(recipe).folder) / "train"


def test_the_stage_writes_a_checkpoint_that_reads_back_and_is_skipped_then(recipe):
    run = open_run(load_recipe(recipe), QuietUi())
    record = execute(STAGE, run)
    assert record["result"]["steps"] == 4
    found = native.read(best_of(recipe) / "best")
    assert found.contract.sizes.head_dim == 16
    assert found.contract.draft_vocab_size == 64
    assert found.contract.ttt_steps == 2
    assert execute(STAGE, run)["skipped"]


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
def test_two_processes_by_torchrun_finish_the_stage_once(recipe, context):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "draftsmith.train.worker", str(recipe), "--set", f"train.context_parallel={context}"]
    for expected in ("done", "done"):  # the second time there is nothing to do
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        record = json.loads((best_of(recipe) / "run.json").read_text())
        assert record["status"] == expected
    assert record["result"]["packs"] == 8 // context
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
