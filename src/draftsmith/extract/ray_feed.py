"""The feed over several machines: engines are the actors of a Ray Data pipeline, the trainer reads its output in order.

Ray places the actors, retries what a dead one had in hand on another, starts it again, and holds the pipeline back
while the trainer is busy (the object store's share is its bound). Needs `pip install draftsmith[ray]`, and the run's
folder on a disk that every machine sees under the same path.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UserError
from draftsmith.extract.codecs import Codec
from draftsmith.extract.feed import FeedFigures, Pack
from draftsmith.extract.rows import Item
from draftsmith.extract.states import States

if TYPE_CHECKING:
    from draftsmith.stage import Run

BLOCK_BYTES = 32 << 20
"""About what one block of made packs holds: the grain in which Ray bounds and hands over."""


class PackMaker:
    """One engine in an actor. Packs come as JSON lists of row ids; the rows are read from the run's capture folder."""

    def __init__(self, recipe: dict[str, Any], folder: str) -> None:
        from draftsmith.extract.engines import engines_of
        from draftsmith.extract.stage import items, settle_codec
        from draftsmith.recipe import parse_recipe
        from draftsmith.stage import Run
        from draftsmith.ui import QuietUi

        run = Run(parse_recipe(recipe, "the run's recipe"), Path(folder), QuietUi())
        self.codec = settle_codec(run)[0]
        self.rows: dict[str, Item] = {i.row_id: i for i in items(run, Counter())}
        name = f"engine-{socket.gethostname()}-{os.getpid()}"
        self.engine = engines_of(run, 1, name)[0]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import numpy as np
        from safetensors.torch import save

        from draftsmith.extract.buffer import to_tensors

        made = np.empty(len(batch["pack"]), dtype=object)
        for i, pack in enumerate(batch["pack"]):
            states = self.engine.compute([self.rows[row_id] for row_id in json.loads(pack)])
            made[i] = save(to_tensors(self.codec, states))
        return {"number": batch["number"], "states": made}


class RayFeed:
    """Iterate it: (pack, its states), in order. count: engines; limit: bytes that may wait between them and the trainer.

    UserError without Ray, or where an engine cannot be had."""

    def __init__(
        self, run: Run, packs: Iterable[Pack], codec: Codec, count: int, limit: int, figures: FeedFigures
    ) -> None:
        try:
            import ray
            import ray.data
        except ImportError:
            raise UserError(
                "ray is not installed", "train.stream: ray starts its engines by it", "pip install 'draftsmith[ray]'"
            ) from None
        self.codec, self.figures = codec, figures
        self._packs = list(packs)
        self._closed = False
        if not self._packs:
            return
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        context = ray.data.DataContext.get_current().copy()
        context.enable_progress_bars = False
        context.target_max_block_size = min(BLOCK_BYTES, max(limit // 4, 1 << 20))
        context.execution_options.preserve_order = True
        context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
            object_store_memory=limit
        )
        gpus = 1 if ray.cluster_resources().get("GPU", 0) > 0 else 0
        rows = [{"number": n, "pack": json.dumps([i.row_id for i in p])} for n, p in enumerate(self._packs)]
        with ray.data.DataContext.current(context):
            data = ray.data.from_items(rows, override_num_blocks=min(len(rows), 200))
            self._data = data.map_batches(
                PackMaker,
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=count),
                num_cpus=1,
                num_gpus=gpus,
                fn_constructor_kwargs={
                    "recipe": run.recipe.model_dump(mode="json", by_alias=True),
                    "folder": str(run.folder),
                },
            )

    def __iter__(self) -> Iterator[tuple[Pack, list[States]]]:
        from safetensors.torch import load

        from draftsmith.extract.buffer import from_tensors

        if not self._packs:
            return
        expected, began = 0, time.monotonic()
        try:
            for row in self._data.iter_rows():
                if self._closed:
                    return
                if row["number"] != expected:
                    raise AssertionError(f"Ray gave pack {row['number']} where {expected} was due")
                expected += 1
                self.figures.packs += 1
                self.figures.starved += time.monotonic() - began
                yield self._packs[row["number"]], from_tensors(self.codec, load(row["states"]))
                began = time.monotonic()
        except (AssertionError, UserError):
            raise
        except Exception as e:
            raise UserError(
                f"the engines that Ray runs failed: {e.__cause__ or e}",
                "training goes on from what was saved",
                "see the engines' logs in the extract stage's folder, then start again",
            ) from e

    def close(self) -> None:
        """Give the engines back (Ray ends a pipeline whose reader has gone)."""
        self._closed = True
