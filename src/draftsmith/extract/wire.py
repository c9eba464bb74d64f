"""The client's end of the plugin's states: what an engine must be started with, what a request must ask, and how a
finished file becomes `States`. (The engine's end: draftsmith_vllm/states.py, which describes the file.)"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.contract import Contract
from draftsmith.engine.plugin_src.draftsmith_vllm.states import ARGMAX, FROM, KEY, VARIABLE
from draftsmith.engine.process_guard import REMOVE
from draftsmith.errors import Exit, UserError
from draftsmith.extract import scratch
from draftsmith.extract.states import States

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
PREFIX = "draftsmith-states-"
RAM_FOLDER = Path("/dev/shm")
RAM_BYTES = 4 << 30
"""Files pass through memory where the RAM disk has so much room, else through the run's own disk."""


class Wire:
    """A folder through which one engine hands over states; use as a context manager, the folder goes at the end.

    layers: the contract's aux layers and the number of layers (the final state), ascending."""

    def __init__(self, contract: Contract, near: Path, argmax: bool = True) -> None:
        self.aux_ids, self.num_layers = list(contract.aux_layer_ids or []), contract.target.num_layers
        self.layers = sorted({*self.aux_ids, self.num_layers})
        self._also_last = self.num_layers in self.aux_ids
        self.argmax = argmax
        ram = RAM_FOLDER.is_dir() and os.access(RAM_FOLDER, os.W_OK) and shutil.disk_usage(RAM_FOLDER).free >= RAM_BYTES
        self.folder, self._lock = scratch.make(RAM_FOLDER if ram else near, PREFIX)
        self._count = itertools.count()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        scratch.remove(self.folder, self._lock)

    def environment(self, given: Mapping[str, str] | None = None) -> dict[str, str]:
        """`given` with the variables for the engine. Both of its model runners are tapped; the older one (V1) is asked for
        where `given` does not choose (on one H200, vLLM 0.26.0, both gave the same states at the same speed)."""
        asked = {"folder": str(self.folder), "layers": self.layers}
        return {RUNNER: "0", **(given or {}), VARIABLE: json.dumps(asked), REMOVE: str(self.folder)}

    def arguments(self) -> list[str]:
        """Flags for the engine: layers are part of its compile cache's key, or a graph without them could be loaded."""
        return ["--additional-config", json.dumps({"draftsmith_states": self.layers})]

    def ask(self, boundary: int | None) -> tuple[str, dict[str, Any]]:
        """A file name for one request, and the body fields that ask for it. boundary: the first answer token's index;
        None = the prompt's end."""
        name = f"s{next(self._count)}"
        where = {} if boundary is None else {FROM: max(boundary - 1, 0)}
        if self._also_last:  # an aux stream too, and so wanted at every position
            where = {FROM: 0}
        return name, {"vllm_xargs": {KEY: name, **where, **({} if self.argmax else {ARGMAX: 0})}}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def sweep(self, wanted: Container[str]) -> int:
        """Remove the finished files of requests whose names are not wanted (answers that were asked for again, given up or
        left out); returns how many."""
        removed = 0
        for path in self.folder.glob("*.safetensors"):
            if path.stem not in wanted:
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def wait(self, name: str, alive: Callable[[], None], timeout: float = 120.0) -> Path:
        """The finished file. alive() raises where the engine has died; UserError after `timeout` seconds."""
        path, started, pause = self.path(name), time.monotonic(), 0.001
        while not path.exists():
            if time.monotonic() - started > timeout:
                raise UserError(
                    f"the engine answered but gave no states within {timeout:.0f} s",
                    "the plugin is not in effect there, or its folder cannot be written",
                    "see the engine's log for 'draftsmith_vllm'",
                    Exit.NO,
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
            if pause >= 0.05:
                alive()
        return path

    def take(self, name: str, token_ids: Sequence[int], boundary: int, alive: Callable[[], None]) -> States:
        """The row's states, its file removed (they lie in it while they are used). A row that was generated lacks the
        state of its last token (the engine never read it): the one before stands in, at a position that no training step
        uses.

        UserError where the engine's tokens are not the row's, or a part is missing."""
        from safetensors import safe_open

        path = self.wait(name, alive)
        with safe_open(str(path), framework="pt", device="cpu") as f:
            streams, last, ids, tops = (f.get_tensor(n) for n in ("streams", "last", "token_ids", "argmax"))
            start = int(f.metadata()["start"])
        path.unlink()
        T = len(token_ids)
        want = torch.as_tensor(token_ids, dtype=torch.int32)
        if start or len(ids) < T - 1:
            raise UserError(
                f"the engine gave states for positions {start} to {start + len(ids)} of a row of {T} tokens",
                "a prefix cache keeps tokens from being computed, and rows must not be shortened (H01)",
                "start the engine with --no-enable-prefix-caching",
                Exit.NO,
            )
        n = min(len(ids), T)
        if not torch.equal(ids[:n], want[:n]):
            at = int((ids[:n] != want[:n]).nonzero()[0])
            raise UserError(
                f"the engine computed other tokens than the row's: at position {at} {int(ids[at])}, not {int(want[at])}",
                "states and tokens would not belong together",
                "report this with the engine's version",
                Exit.NO,
            )
        first, begins = max(boundary - 1, 0), len(ids) - len(last)
        if n < T:
            streams, last = _last_again(streams), _last_again(last)
            tops = torch.cat([tops, tops.new_full((1,), -1)])
        aux = streams[:T]
        if self._also_last:
            aux = torch.cat([aux, last[:T].unsqueeze(1)], dim=1)
        return States(
            token_ids=want.long(),
            boundary=boundary,
            aux=aux,
            final_start=first,
            final=last[max(first - begins, 0) : max(T - begins, 0)],
            argmax=tops[first:T].long() if self.argmax else None,
        )


def _last_again(x: Tensor) -> Tensor:
    """bf16 [n, …] → [n + 1, …]. numpy's copy, not torch's: that would start a team of threads in each of the callers'."""
    bits = x.view(torch.int16).numpy()
    return torch.from_numpy(np.concatenate([bits, bits[-1:]])).view(torch.bfloat16)
