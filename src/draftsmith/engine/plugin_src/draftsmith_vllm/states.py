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
from pathlib import Path
from types import ModuleType
from typing import Any

from . import NAME, logger
from .carry import Carrier
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
        self.later: Any = None
        """Rows whose argmax comes for free with this step's logits, int [requests]; None where nobody wants it."""
        self._order: list[str] = []
        """Requests of the last batch, for which the following were made."""
        self._members: list[Kept | None] = []
        self._numbers: Any = None
        self._alone: list[int] = []
        self._argmax_wanted, self._nobody = False, True
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
            if kept is not None:
                self._order = []
                if self.is_writer():
                    self.carrier.ended(kept)
        if self.writes:
            self.carrier.commit()  # now: an engine that has nothing more to compute comes here for the last time
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
            self._order = []

    def _look_up(self, order: list[str]) -> None:
        """Who is in the batch. Mostly the same as a step ago: then nothing is done a request."""
        import numpy as np

        self._order, self._members = list(order), [self.kept.get(r) for r in order]
        self._numbers = np.array([0 if k is None else k.number for k in self._members], dtype=np.int32)
        self._alone = [i for i, k in enumerate(self._members) if k is not None and k.ends is not None]
        self._argmax_wanted = any(k is not None and k.argmax_wanted for k in self._members)
        self._nobody = not self._numbers.any()

    def take(self, hidden: Any, aux: Any, ids: Any, order: list[str], at: Any, counts: Any) -> None:
        """After the model: this step's streams on their way to the host, and the argmax at wanted positions.

        order: the batch's requests; at, counts: int32 [requests], first position in this step and tokens, nobody else's.
        This runs between two steps of the engine: nothing in it waits for the device, and of a step of answers nothing is
        done a request."""
        self.later = None
        if not self.kept:
            return
        if order != self._order:
            self._look_up(order)
        if self._nobody:
            return
        writes, ends = self.is_writer(), counts.cumsum()
        if writes:
            self.carrier.rows(aux, ids, self._numbers, at, counts, self._members)
        if self._argmax_wanted:
            # The last position is left to the sampling logits, which the engine computes anyway.
            self.later = ends - 1
            if int(ends[-1]) > len(order):
                self._argmax(hidden, at, counts, ends)
        for i in self._alone:
            kept = self._members[i]
            if kept is not None and kept.ends is not None and int(at[i]) + int(counts[i]) >= kept.ends:
                self.kept.pop(order[i], None)
                self.over.append(kept)
                self._order = []

    def _argmax(self, hidden: Any, at: Any, counts: Any, ends: Any) -> None:
        """Most likely tokens at prompt positions but a chunk's last. All ranks take part: the head is split between them."""
        import numpy as np
        import torch

        spans = []
        for i in (counts > 1).nonzero()[0].tolist():
            kept, end = self._members[i], int(ends[i])
            begin = 0 if kept is None else end - int(counts[i]) + max(kept.first - int(at[i]), 0)
            if kept is not None and kept.argmax_wanted and begin < end - 1:
                spans.append((begin, end - 1))
        if not spans:
            return
        # Made on the device: a copy from the host might wait for all that is under way there.
        index, found = torch.cat([torch.arange(*span, device=hidden.device) for span in spans]), []
        for part in index.split(HEAD_CHUNK):
            logits = self.runner.model.compute_logits(hidden[part])
            found.append(part if logits is None else logits.argmax(-1))  # None: this rank only lends its share
        if self.is_writer():
            self.carrier.tops(torch.cat(found), np.concatenate([np.arange(*span) for span in spans]))

    def sampled(self, logits: Any) -> None:
        """The logits that the step samples from, as yet untouched: their argmax."""
        if self.later is not None and logits is not None and self.is_writer():
            if len(logits) == len(self.later):
                self.carrier.tops(logits.argmax(-1), self.later)
            else:
                logger.error("%s: %d rows of logits for %d requests", NAME, len(logits), len(self.later))
        self.later = None

    def end(self) -> None:
        """After a step of the older runner."""
        self.sampled(getattr(getattr(self.runner, "execute_model_state", None), "logits", None))
        self._hand_on()
        self.step = None

    def _hand_on(self) -> None:
        """The step is complete."""
        over, self.over = self.over, []
        if self.writes:
            for kept in over:
                self.carrier.ended(kept)
            self.carrier.commit(urgent=bool(over))


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
    import numpy as np

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
                batch, scheduled = self.input_batch, tap.step.num_scheduled_tokens
                order = batch.req_ids
                counts = np.fromiter(map(scheduled.__getitem__, order), np.int32, len(order))
                at = batch.num_computed_tokens_cpu[: len(order)].astype(np.int32)
                tap.take(*output, self.input_ids.gpu if input_ids is None else input_ids, order, at, counts)
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
            # Copies: both may lie in arrays that the next step fills.
            at, counts = batch.num_computed_tokens_np[:n].astype("i4"), batch.num_scheduled_tokens[:n].astype("i4")
            with inference_mode():
                tap.take(state.hidden_states, state.aux_hidden_states, batch.input_ids, batch.req_ids, at, counts)
        return output

    def sample_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        tap = getattr(self, "_draftsmith_tap", None)
        self._draftsmith_sampling = tap is not None and tap.later is not None
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
