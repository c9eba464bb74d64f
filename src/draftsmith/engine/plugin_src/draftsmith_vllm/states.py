"""Hidden states out of a running vLLM: the chosen layers' streams of every wanted request, as one file each.

The model's own EAGLE-3 interface returns the streams beside its output (so CUDA graphs and torch.compile stay on), and
the runner is tapped where it calls the model: vLLM's older one (V1, also the CPU's) and its newer one (V2). Nothing is
kept in the KV cache and no draft token is verified, so answering costs what it costs without; what waits for copies and
files is a thread of ours (carry.py). Chunked prefill and preemption are handled by position; with tensor parallel, rank 0
writes. The token ids in the file are those that the model was really given.

DRAFTSMITH_VLLM_STATES   {"folder": …, "layers": [2, 15, 27, 30]}; unset: nothing is tapped
A request asks with vllm_xargs: {"draftsmith_states": NAME, "draftsmith_from": POSITION, "draftsmith_argmax": 1 or 0};
NAME.safetensors appears in the folder, by rename, when the request has ended:
  (POSITION left out: the prompt's last; argmax left out: 1)
  streams bf16 [tokens, layers - 1, hidden]; last bf16 [tokens from POSITION on, hidden], of the highest layer;
  token_ids int32 [tokens]; argmax int32 [tokens], -1 before POSITION;
  metadata: layers, start (0, or the position of the first token that is there if a prefix cache cut others off).
Id k is the stream entering layer k; the number of layers, the last state before the final norm.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from . import NAME, logger
from .carry import Carrier, Placed
from .hooks import after_import
from .kept import Kept

VARIABLE = "DRAFTSMITH_VLLM_STATES"
KEY, FROM, ARGMAX = "draftsmith_states", "draftsmith_from", "draftsmith_argmax"
RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"),
)
NEEDED = ("_setup_eagle3_aux_hidden_state_outputs", "_model_forward", "execute_model")
NEEDED_V2 = ("load_model", "execute_model", "sample")
"""Of the newer runner (0.23 to 0.33); its ExecuteModelState holds the step's batch and streams."""
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


class Tap:
    """What one runner keeps. `step` is the scheduler's output while a real step runs, None in warm-up."""

    def __init__(self, runner: Any, given: dict[str, Any]) -> None:
        self.runner, self.layers = runner, [int(k) for k in given["layers"]]
        self.folder = Path(given["folder"])
        self.kept: dict[str, Kept] = {}
        self.step: Any = None
        self.later: Placed = []
        """(Request, position, row of the sampling logits, 1) whose argmax comes for free with this step's logits."""
        self.over: list[Kept] = []
        """Requests whose last step this is, known without the scheduler's word."""
        self.writes: bool | None = None
        self.threads = int(given.get("threads", 0))
        self._carrier: Carrier | None = None

    def is_writer(self) -> bool:
        if self.writes is None:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            self.writes = get_tensor_model_parallel_rank() == 0
            if self.writes:
                self.folder.mkdir(parents=True, exist_ok=True)
        return self.writes

    @property
    def carrier(self) -> Carrier:
        if self._carrier is None:
            hidden, most = self.runner.model_config.get_hidden_size(), getattr(self.runner, "max_num_tokens", 0)
            self._carrier = Carrier(self.folder, self.layers, hidden, most or 2048, self.threads)
        return self._carrier

    def begin(self, scheduled: Any) -> None:
        """Before a step: hand on what has finished, note who is new."""
        self._hand_on()
        self.step = scheduled
        for req_id in scheduled.finished_req_ids:
            kept = self.kept.pop(req_id, None)
            if kept is not None and self.is_writer():
                self.carrier.ended(kept)
        for new in scheduled.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            name = extra.get(KEY)
            if name is None:
                continue
            if not isinstance(name, str) or not SAFE.fullmatch(name):
                logger.error("%s: a request asks for states under the name %r; it gets none", NAME, name)
                continue
            first, prompt = extra.get(FROM), len(new.prompt_token_ids or (0,))
            alone = getattr(new.sampling_params, "max_tokens", None) == 1
            self.kept[new.req_id] = Kept(
                name,
                prompt - 1 if first is None else int(first),
                ends=prompt if alone else None,
                argmax_wanted=bool(int(extra.get(ARGMAX, 1))),
            )

    def take(self, hidden: Any, aux: Any, ids: Any, steps: Iterable[tuple[str, int, int]]) -> None:
        """After the model: this step's streams on their way to the host, and the argmax at wanted positions.

        steps: (request, its first position in this step, tokens) in the order of the batch. This runs between two steps
        of the engine: a few tenths of a microsecond a request, and nothing that waits for the device."""
        import torch

        rows: Placed = []
        wanted: list[tuple[Kept, int, int, int]] = []
        later: Placed = []
        self.later, offset, known = [], 0, self.kept.get
        for i, (req_id, at, n) in enumerate(steps):
            kept = known(req_id)
            if kept is not None:
                rows.append((kept, at, offset, n))
                end = at + n
                if kept.argmax_wanted and end > kept.first:
                    # The last position is left to the sampling logits, which the engine computes anyway.
                    later.append((kept, end - 1, i, 1))
                    if n > 1 and end - 1 > (begin := max(kept.first, at)):
                        wanted.append((kept, begin, offset + begin - at, end - 1 - begin))
                if kept.ends is not None and end >= kept.ends:
                    self.over.append(self.kept.pop(req_id))
            offset += n
        if not rows:
            return
        self.later = later
        tops = self._argmax(hidden, wanted) if wanted else None
        if not self.is_writer():
            return
        # All are copies: the buffers below them are the next step's too.
        *lower, last = [a[:offset] for a in aux]
        streams = torch.stack(lower, dim=1).to(torch.bfloat16) if lower else last.new_empty(offset, 0, last.shape[1])
        last, ids = last.to(torch.bfloat16, copy=True), ids[:offset].to(torch.int32, copy=True)
        self.carrier.rows(streams, last, ids, rows)
        if tops is not None:
            self.carrier.tops(*tops)

    def _argmax(self, hidden: Any, wanted: list[tuple[Kept, int, int, int]]) -> tuple[Any, Placed]:
        """Most likely tokens at prompt positions: (request, position, row, rows). All ranks take part: the head is split
        between them."""
        import torch

        index = torch.cat([torch.arange(row, row + n, device=hidden.device) for _, _, row, n in wanted])
        placed: Placed = []
        m, found = 0, []
        for kept, at, _, n in wanted:
            placed.append((kept, at, m, n))
            m += n
        for part in index.split(HEAD_CHUNK):
            logits = self.runner.model.compute_logits(hidden[part])
            found.append(part if logits is None else logits.argmax(-1))  # None: this rank only lends its share
        return torch.cat(found), placed

    def sampled(self, logits: Any) -> None:
        """The logits that the step samples from, as yet untouched: their argmax."""
        if self.later and logits is not None and self.is_writer():
            self.carrier.tops(logits.argmax(-1), self.later)
        self.later = []

    def end(self) -> None:
        """After a step of the older runner."""
        self.sampled(getattr(getattr(self.runner, "execute_model_state", None), "logits", None))
        self._hand_on()
        self.step = None

    def _hand_on(self) -> None:
        over, self.over = self.over, []
        for kept in over:
            if self.is_writer():
                self.carrier.ended(kept)


def _prepare(runner: Any, given: dict[str, Any]) -> None:
    """Ask the loaded model for the layers' streams and give the runner its tap."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    if runner.speculative_config is not None:
        raise RuntimeError(f"{NAME}: states are taken from a plain engine; start it without a speculative config")
    if not supports_eagle3(runner.get_model()):
        raise RuntimeError(
            f"{NAME}: {type(runner.get_model()).__name__} has no EAGLE-3 interface in this vLLM: it cannot give its layers' "
            "streams, and could not serve a drafter either"
        )
    runner.use_aux_hidden_state_outputs = True
    runner.model.set_aux_hidden_state_layers(tuple(int(k) for k in given["layers"]))
    runner._draftsmith_tap = Tap(runner, given)
    logger.info("%s: states of layers %s go to %s", NAME, given["layers"], given["folder"])


def _require(cls: type, names: tuple[str, ...]) -> None:
    if missing := [n for n in names if not hasattr(cls, n)]:
        raise RuntimeError(f"{NAME}: this vLLM's {cls.__name__} has no {', '.join(missing)}; states cannot be taken")


def _tap(cls: type, given: dict[str, Any]) -> None:
    """The older runner, and the CPU's, which overrides some of its methods."""
    _require(cls, NEEDED)
    own = cls.__dict__

    if "_setup_eagle3_aux_hidden_state_outputs" in own:
        cls._setup_eagle3_aux_hidden_state_outputs = lambda self: _prepare(self, given)  # type: ignore[attr-defined]
    if "_model_forward" in own:
        forward = own["_model_forward"]

        def model_forward(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, input_ids, *args, **kwargs)
            tap = getattr(self, "_draftsmith_tap", None)
            if tap is not None and tap.step is not None:
                batch, counts = self.input_batch, tap.step.num_scheduled_tokens
                ids, at = batch.req_ids, batch.num_computed_tokens_cpu[: len(batch.req_ids)].tolist()
                steps = zip(ids, at, map(counts.__getitem__, ids), strict=True)
                tap.take(*output, self.input_ids.gpu if input_ids is None else input_ids, steps)
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


def _tap_v2(cls: type, given: dict[str, Any]) -> None:
    """The newer runner: a step leaves its batch and streams in `execute_model_state`, and samples afterwards."""
    from torch import inference_mode

    _require(cls, NEEDED_V2)
    own = cls.__dict__
    load, execute, sample = own["load_model"], own["execute_model"], own["sample"]

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        _prepare(self, given)
        compute = self.model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            if self._draftsmith_sampling:
                self._draftsmith_tap.sampled(logits)
            return logits

        self._draftsmith_sampling = False
        self.model.compute_logits = compute_logits

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # Warm-up runs make up their requests and say so, the second of them in order.
        tap = None if kwargs.get("dummy_run", args[1:2] == (True,)) else getattr(self, "_draftsmith_tap", None)
        if tap is None:
            return execute(self, scheduler_output, *args, **kwargs)
        tap.begin(scheduler_output)
        output = execute(self, scheduler_output, *args, **kwargs)
        state = self.execute_model_state if scheduler_output.total_num_scheduled_tokens else None
        if state is not None and state.aux_hidden_states is not None:
            batch = state.input_batch
            n = len(batch.req_ids)
            at, counts = batch.num_computed_tokens_np[:n].tolist(), batch.num_scheduled_tokens[:n].tolist()
            with inference_mode():
                steps = zip(batch.req_ids, at, counts, strict=True)
                tap.take(state.hidden_states, state.aux_hidden_states, batch.input_ids, steps)
        return output

    def sample_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        tap = getattr(self, "_draftsmith_tap", None)
        self._draftsmith_sampling = tap is not None and bool(tap.later)
        try:
            return sample(self, *args, **kwargs)
        finally:
            self._draftsmith_sampling = False
            if tap is not None:
                tap._hand_on()

    cls.load_model, cls.execute_model, cls.sample = load_model, execute_model, sample_step  # type: ignore[attr-defined]


def install() -> None:
    """Tap the runners of this process if the environment asks for it."""
    given = settings()
    if given is None:
        return
    for module, name in RUNNERS:

        def then(loaded: ModuleType, name: str = name, v2: bool = ".gpu." in module) -> None:
            cls = getattr(loaded, name)
            if "_draftsmith_tapped" not in cls.__dict__:
                cls._draftsmith_tapped = True
                (_tap_v2 if v2 else _tap)(cls, given)

        then.__qualname__ = f"tap {module}"
        after_import(module, then)
