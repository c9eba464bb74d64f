"""Hidden states out of a running vLLM: the chosen layers' streams of every wanted request, as one file each.

The model's own EAGLE-3 interface returns the streams beside its output (so CUDA graphs and torch.compile stay on), and
the runner is tapped where it calls the model. Nothing is kept in the KV cache and no draft token is verified, so
answering costs what it costs without. Chunked prefill and preemption are handled by position; with tensor parallel, rank
0 writes. The token ids in the file are those that the model was really given.

DRAFTSMITH_VLLM_STATES   {"folder": …, "layers": [2, 15, 27, 30], "argmax": true}; unset: nothing is tapped
A request asks with vllm_xargs: {"draftsmith_states": NAME, "draftsmith_from": POSITION}; NAME.safetensors appears in the
folder, by rename, when the request has ended:
  (POSITION left out: the prompt's last)
  states bf16 [tokens, layers, hidden]; token_ids int32 [tokens]; argmax int32 [tokens], -1 before POSITION;
  metadata: layers, start (0, or the first position that is there if a prefix cache cut it off).
Id k is the stream entering layer k; the number of layers, the last state before the final norm.
"""

from __future__ import annotations

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from . import NAME, logger
from .hooks import after_import

VARIABLE = "DRAFTSMITH_VLLM_STATES"
KEY, FROM = "draftsmith_states", "draftsmith_from"
RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner"),
)
NEEDED = ("_setup_eagle3_aux_hidden_state_outputs", "_model_forward", "execute_model")
SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
HEAD_CHUNK = 512


def settings() -> dict[str, Any] | None:
    """The parsed variable; None where it is unset. RuntimeError where it is no good."""
    raw = os.environ.get(VARIABLE)
    if not raw:
        return None
    found = json.loads(raw)
    layers = found.get("layers")
    if not layers or sorted(set(layers)) != list(layers):
        raise RuntimeError(f"{NAME}: {VARIABLE} has layers {layers}; distinct, ascending ids are needed")
    if not Path(str(found.get("folder", ""))).is_absolute():
        # A relative one would depend on the folder that the engine happens to be started in.
        raise RuntimeError(f"{NAME}: {VARIABLE} names no absolute folder")
    return dict(found)


class Kept:
    """The states of one request while it runs: host buffers that grow, filled by position."""

    def __init__(self, name: str, first: int, layers: int, hidden: int, dtype: Any) -> None:
        import torch

        self.name, self.first, self.end, self.start = name, first, 0, -1
        self.states = torch.empty(0, layers, hidden, dtype=dtype)
        self.ids = torch.empty(0, dtype=torch.int32)
        self.argmax = torch.empty(0, dtype=torch.int32)

    def put(self, at: int, states: Any, ids: Any) -> None:
        n = states.shape[0]
        if at + n > self.ids.shape[0]:
            self._grow(max(at + n, 2 * self.ids.shape[0], 64))
        if self.start < 0 or at < self.start:
            self.start = at
        # After a preemption the tokens are computed again from the start: the same values, by position.
        self.states[at : at + n] = states
        self.ids[at : at + n] = ids
        self.end = max(self.end, at + n)

    def _grow(self, room: int) -> None:
        for name in ("states", "ids", "argmax"):
            old = getattr(self, name)
            new = old.new_empty(room, *old.shape[1:])
            new[: old.shape[0]] = old
            if name == "argmax":
                new[old.shape[0] :] = -1
            setattr(self, name, new)

    def write(self, folder: Path, layers: list[int]) -> None:
        """One safetensors file: header and the buffers as they are, then a rename."""
        n = self.end
        parts = [
            ("states", "BF16", self.states[:n]),
            ("token_ids", "I32", self.ids[:n]),
            ("argmax", "I32", self.argmax[:n]),
        ]
        meta = {"layers": json.dumps(layers), "start": str(max(self.start, 0))}
        header: dict[str, Any] = {"__metadata__": meta}
        at = 0
        for name, kind, t in parts:
            size = t.numel() * t.element_size()
            header[name] = {"dtype": kind, "shape": list(t.shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        part = folder / f".{self.name}.part"
        with part.open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for _, kind, t in parts:
                import torch

                f.write(t.contiguous().view(torch.int16 if kind == "BF16" else t.dtype).numpy().data)
        part.rename(folder / f"{self.name}.safetensors")


class Tap:
    """What one runner keeps. `step` is the scheduler's output while a real step runs, None in warm-up."""

    def __init__(self, runner: Any, given: dict[str, Any]) -> None:
        self.runner, self.layers = runner, [int(k) for k in given["layers"]]
        self.folder, self.with_argmax = Path(given["folder"]), bool(given.get("argmax", True))
        self.kept: dict[str, Kept] = {}
        self.step: Any = None
        self.later: list[tuple[Kept, int, int]] = []
        """(request, position, row of the sampling logits) whose argmax comes for free with this step's logits."""
        self.writes: bool | None = None
        self.pool = ThreadPoolExecutor(int(given.get("threads", 2)), thread_name_prefix=NAME)
        self.lock = threading.Lock()

    def is_writer(self) -> bool:
        if self.writes is None:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            self.writes = get_tensor_model_parallel_rank() == 0
            if self.writes:
                self.folder.mkdir(parents=True, exist_ok=True)
        return self.writes

    def begin(self, scheduled: Any) -> None:
        """Before a step: write what has finished, note who is new."""
        self.step = scheduled
        for req_id in scheduled.finished_req_ids:
            kept = self.kept.pop(req_id, None)
            if kept is not None and kept.end and self.is_writer():
                self.pool.submit(self._write, kept)
        for new in scheduled.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            name = extra.get(KEY)
            if name is None:
                continue
            if not isinstance(name, str) or not SAFE.fullmatch(name):
                logger.error("%s: a request asks for states under the name %r; it gets none", NAME, name)
                continue
            import torch

            hidden = self.runner.model_config.get_hidden_size()
            first = extra.get(FROM)
            if first is None:
                first = len(new.prompt_token_ids or (0,)) - 1
            self.kept[new.req_id] = Kept(name, int(first), len(self.layers), hidden, torch.bfloat16)

    def _write(self, kept: Kept) -> None:
        try:
            kept.write(self.folder, self.layers)
        except OSError as e:
            logger.error("%s: the states of %s could not be written: %s", NAME, kept.name, e)

    def take(self, output: Any, input_ids: Any) -> None:
        """After the model: this step's streams to the host, and the argmax at wanted positions."""
        import torch

        hidden, aux = output
        total = self.step.total_num_scheduled_tokens
        batch = self.runner.input_batch
        rows, offset = [], 0
        for i, req_id in enumerate(batch.req_ids):
            n = self.step.num_scheduled_tokens[req_id]
            kept = self.kept.get(req_id)
            if kept is not None:
                rows.append((kept, int(batch.num_computed_tokens_cpu[i]), offset, n, i))
            offset += n
        self.later = []
        if not rows:
            return
        tops = self._argmax(hidden, rows) if self.with_argmax else None
        if not self.is_writer():
            return
        ids = self.runner.input_ids.gpu if input_ids is None else input_ids
        stacked = torch.stack([a[:total] for a in aux], dim=1).to(torch.bfloat16)
        host = _to_host(stacked, ids[:total].to(torch.int32))
        for kept, at, begin, n, _ in rows:
            kept.put(at, host[0][begin : begin + n], host[1][begin : begin + n])
        for kept, at, found in tops or []:
            kept.argmax[at : at + len(found)] = found.cpu()

    def _argmax(self, hidden: Any, rows: list[Any]) -> list[tuple[Kept, int, Any]]:
        """Most likely tokens at prompt positions from `first` on. The last position of each request is left to the
        sampling logits, which the engine computes anyway. All ranks take part: the head is split between them."""
        import torch

        wanted, places = [], []
        for kept, at, begin, n, i in rows:
            first = max(kept.first - at, 0)
            if first >= n:
                continue
            self.later.append((kept, at + n - 1, i))
            if first < n - 1:
                wanted.append(torch.arange(begin + first, begin + n - 1, device=hidden.device))
                places.append((kept, at + first, n - 1 - first))
        if not wanted:
            return []
        index, found = torch.cat(wanted), []
        for part in index.split(HEAD_CHUNK):
            logits = self.runner.model.compute_logits(hidden[part])
            found.append(logits.argmax(-1).to(torch.int32))
        tops = torch.cat(found).split([n for _, _, n in places])
        return [(kept, at, t) for (kept, at, _), t in zip(places, tops, strict=True)]

    def end(self) -> None:
        """After a step: the argmax of the logits that the step sampled from."""
        state = getattr(self.runner, "execute_model_state", None)
        logits = getattr(state, "logits", None)
        if self.later and logits is not None and self.is_writer():
            rows = [i for _, _, i in self.later]
            found = logits[rows].argmax(-1).tolist()
            for (kept, at, _), token in zip(self.later, found, strict=True):
                kept.argmax[at] = token
        self.later, self.step = [], None


def _to_host(states: Any, ids: Any) -> tuple[Any, Any]:
    """Both tensors on the CPU; from a GPU through pinned memory, in one wait."""
    import torch

    if states.device.type == "cpu":
        return states, ids
    pinned = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
    pinned.copy_(states, non_blocking=True)
    ids_host = ids.to("cpu", non_blocking=False)  # waits for the stream, and so for the copy before it
    return pinned, ids_host


def _tap(cls: type, given: dict[str, Any]) -> None:
    missing = [n for n in NEEDED if not hasattr(cls, n)]
    if missing:
        raise RuntimeError(f"{NAME}: this vLLM's {cls.__name__} has no {', '.join(missing)}; states cannot be taken")
    own = cls.__dict__

    def setup(self: Any) -> None:
        from vllm.model_executor.models.interfaces import supports_eagle3

        if self.speculative_config is not None:
            raise RuntimeError(f"{NAME}: states are taken from a plain engine; start it without a speculative config")
        if not supports_eagle3(self.get_model()):
            raise RuntimeError(
                f"{NAME}: {type(self.get_model()).__name__} has no EAGLE-3 interface in this vLLM: it cannot give its layers' "
                "streams, and could not serve a drafter either"
            )
        self.use_aux_hidden_state_outputs = True
        self.model.set_aux_hidden_state_layers(tuple(int(k) for k in given["layers"]))
        self._draftsmith_tap = Tap(self, given)
        logger.info("%s: states of layers %s go to %s", NAME, given["layers"], given["folder"])

    if "_setup_eagle3_aux_hidden_state_outputs" in own:
        cls._setup_eagle3_aux_hidden_state_outputs = setup  # type: ignore[attr-defined]
    if "_model_forward" in own:
        forward = own["_model_forward"]

        def model_forward(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, input_ids, *args, **kwargs)
            tap = getattr(self, "_draftsmith_tap", None)
            if tap is not None and tap.step is not None:
                tap.take(output, input_ids)
            return output

        cls._model_forward = model_forward  # type: ignore[attr-defined]
    if "execute_model" in own:
        execute = own["execute_model"]

        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            tap = getattr(self, "_draftsmith_tap", None)
            if tap is None:
                return execute(self, scheduler_output, *args, **kwargs)
            tap.begin(scheduler_output)
            try:
                return execute(self, scheduler_output, *args, **kwargs)
            finally:
                tap.end()

        cls.execute_model = execute_model  # type: ignore[attr-defined]


def install() -> None:
    """Tap the runners of this process if the environment asks for it."""
    given = settings()
    if given is None:
        return
    for module, name in RUNNERS:

        def then(loaded: ModuleType, name: str = name) -> None:
            cls = getattr(loaded, name)
            if "_draftsmith_tapped" not in cls.__dict__:
                cls._draftsmith_tapped = True
                _tap(cls, given)

        then.__qualname__ = f"tap {module}"
        after_import(module, then)
