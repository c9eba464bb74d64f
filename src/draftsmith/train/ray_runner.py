"""The train stage over several machines by Ray Train: the same loop, started by Ray instead of torchrun.

    python -m draftsmith.train.ray_runner RECIPE WORKERS

Needs `pip install draftsmith[ray]`, and the run's folder on a disk that every machine sees under the same path.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from draftsmith.errors import Exit, UserError


def _worker(job: dict[str, Any]) -> None:
    """One worker: Ray has set up the process group."""
    from draftsmith.train.worker import train_together

    train_together(Path(job["recipe"]), job["overrides"])


def train_with_ray(recipe: Path, overrides: dict[str, Any], workers: int, gpus: bool | None = None) -> dict[str, Any]:
    """Run the train stage on `workers` Ray workers; returns the stage's record. gpus: one per worker (None = where the
    cluster has any). UserError without Ray, or if the stage fails."""
    try:
        import ray
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError:
        raise UserError(
            "ray is not installed", "training over several machines is run by it", "pip install 'draftsmith[ray]'"
        ) from None
    from draftsmith.pipeline import open_run
    from draftsmith.recipe import load_recipe
    from draftsmith.record import read_record
    from draftsmith.ui import QuietUi

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    with_gpu = ray.cluster_resources().get("GPU", 0) > 0 if gpus is None else gpus
    run = open_run(load_recipe(recipe, overrides), QuietUi())
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"recipe": str(recipe.resolve()), "overrides": overrides},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=with_gpu),
        run_config=RunConfig(name="draftsmith-train", storage_path=str((run.folder / "ray").resolve())),
    )
    try:
        trainer.fit()
    except Exception as e:
        cause = e.__cause__ or e
        raise UserError(
            f"a Ray worker failed: {cause}", "the stage is not done; what was saved is kept", "run it again to go on"
        ) from e
    record = read_record(run.stage_dir("train"))
    if record is None or record.get("status") != "done":
        raise UserError("the train stage left no record", "Ray ended without it", "run it again to go on")
    return record


def main(arguments: list[str]) -> int:
    from draftsmith.ui import ConsoleUi

    ui = ConsoleUi()
    if len(arguments) != 2 or not arguments[1].isdigit():
        ui.warn("usage: python -m draftsmith.train.ray_runner RECIPE WORKERS")
        return int(Exit.BAD_INPUT)
    try:
        record = train_with_ray(Path(arguments[0]), {}, int(arguments[1]))
    except UserError as e:
        ui.warn(str(e))
        return int(e.code)
    ui.note(f"train: {record['result']}")
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
