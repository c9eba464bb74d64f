"""Hidden states through transformers: the reference that every other way of making them is compared with.

Id k is the residual stream entering layer k, taken by a hook on that layer's input; k = n is the input of the final
norm (transformers' own `hidden_states[n]` is already normed). Batches are padded on the right without a mask: under
causal attention no token sees the padding behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.extract.codecs import topk_of_logits
from draftsmith.extract.states import States
from draftsmith.target.config import HIDDEN, LAYERS, load_config, size_of, text_config
from draftsmith.target.loading import bars_for_people_only

_HEAD_CHUNK = 256
"""Positions per lm_head product: bounds the logits to 256 x V."""

NORM_NAMES = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f")


@dataclass(frozen=True)
class Parts:
    """Where the model keeps what is needed here."""

    layers: nn.ModuleList
    norm: nn.Module
    lm_head: nn.Module


def load_model(folder: Path, dtype: torch.dtype, device: str, trust_remote_code: bool = False) -> nn.Module:
    """The target for inference. UserError where transformers cannot load it."""
    import transformers

    bars_for_people_only()
    architecture = (load_config(folder).get("architectures") or [""])[0]
    cls = getattr(transformers, architecture, None) or transformers.AutoModelForCausalLM
    try:
        model = cls.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as e:
        raise UserError(
            f"transformers {transformers.__version__} cannot load the target in {folder}: {e}",
            "its hidden states are what the drafter learns from",
            "extract.backend: vllm takes them from the engine instead",
        ) from None
    model = model.eval().requires_grad_(False)
    return model.to(device)  # type: ignore[no-any-return]


def find_parts(model: nn.Module, layers: int) -> Parts:
    """The decoder layers (a ModuleList of `layers` entries whose owner also has the final norm) and lm_head."""
    for owner in model.modules():
        for child in owner.children():
            if isinstance(child, nn.ModuleList) and len(child) == layers:
                norm = next(
                    (getattr(owner, n) for n in NORM_NAMES if isinstance(getattr(owner, n, None), nn.Module)), None
                )
                head = model.get_output_embeddings()  # type: ignore[operator]
                if norm is not None and head is not None:
                    return Parts(child, norm, head)
    raise UserError(
        f"{type(model).__name__}: no list of {layers} layers with a final norm beside it ({', '.join(NORM_NAMES)})",
        "the aux streams and the final state are taken there",
        "extract.backend: vllm takes them from the engine instead",
    )


class TransformersStates:
    """The target, hooked. `streams(ids)` gives the wanted residual streams of a padded batch.

    aux_ids: ids in the contract's meaning. draft_ids int64 [D]: if given, `states` makes top-k teachers with
    `topk` logits on the draft vocab instead of final states."""

    def __init__(
        self,
        folder: Path,
        aux_ids: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
        draft_ids: Tensor | None = None,
        topk: int = 128,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        # Without bf16 units a CPU emulates bf16 products; float32 is faster there (figures: benchmarks/codec.py).
        self.dtype = dtype or (torch.bfloat16 if self.device != "cpu" else torch.float32)
        text = text_config(load_config(folder))
        self.num_layers = size_of(text, LAYERS, str(folder))
        self.hidden = size_of(text, HIDDEN, str(folder))
        self.aux_ids = list(aux_ids)
        self.model = load_model(folder, self.dtype, self.device, trust_remote_code)
        self.parts = find_parts(self.model, self.num_layers)
        self.topk = topk
        self._draft_head: Tensor | None = None
        if draft_ids is not None:
            weight = self.parts.lm_head.weight
            assert isinstance(weight, Tensor)
            self._draft_head = weight[draft_ids.to(weight.device)]

    @contextmanager
    def _hooks(self, ids: Sequence[int], caught: dict[int, Tensor]) -> Iterator[None]:
        def catch(k: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                caught[k] = args[0] if args else kwargs["hidden_states"]

            return hook

        where = [(k, self.parts.layers[k] if k < self.num_layers else self.parts.norm) for k in sorted(set(ids))]
        handles = [m.register_forward_pre_hook(catch(k), with_kwargs=True) for k, m in where]
        try:
            yield
        finally:
            for h in handles:
                h.remove()

    @torch.no_grad()
    def streams(self, rows: Sequence[Sequence[int]], ids: Sequence[int]) -> dict[int, Tensor]:
        """Residual streams of a right-padded batch: id → [B, T_max, G] in the compute type."""
        longest = max(len(r) for r in rows)
        batch = torch.zeros(len(rows), longest, dtype=torch.long)
        for i, r in enumerate(rows):
            batch[i, : len(r)] = torch.as_tensor(r, dtype=torch.long)
        caught: dict[int, Tensor] = {}
        with self._hooks(ids, caught):
            # logits_to_keep: lm_head at the last position only; what is needed of it is computed in `head`.
            self.model(input_ids=batch.to(self.device), use_cache=False, logits_to_keep=1)
        return caught

    @torch.no_grad()
    def head(self, final: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """final [M, G] before the norm → (positions, normed [m, G], logits float32 [m, V]) in chunks."""
        for start in range(0, final.shape[0], _HEAD_CHUNK):
            part = slice(start, start + _HEAD_CHUNK)
            normed = self.parts.norm(final[part].to(self.dtype))
            yield part, normed, self.parts.lm_head(normed).float()

    @torch.no_grad()
    def states(self, rows: Sequence[Sequence[int]], boundaries: Sequence[int], final_too: bool = False) -> list[States]:
        """`States` of a batch of rows, on the CPU; the teacher from position boundary - 1 on.

        final_too: keep the final state also where a top-k teacher is made."""
        n = self.num_layers
        caught = self.streams(rows, [*self.aux_ids, n])
        stored = {k: t.to(torch.bfloat16) for k, t in caught.items()}
        out = []
        for i, (ids, boundary) in enumerate(zip(rows, boundaries, strict=True)):
            T, start = len(ids), max(boundary - 1, 0)
            aux = torch.stack([stored[k][i, :T] for k in self.aux_ids], dim=1).cpu()
            argmax, tops = [], []
            for _, normed, logits in self.head(caught[n][i, start:T]):
                argmax.append(logits.argmax(-1).cpu())
                if self._draft_head is not None:
                    tops.append(topk_of_logits(normed @ self._draft_head.T, self.topk).cpu())
            out.append(
                States(
                    token_ids=torch.as_tensor(ids, dtype=torch.long),
                    boundary=boundary,
                    aux=aux,
                    final_start=start,
                    final=None if tops and not final_too else stored[n][i, start:T].cpu(),
                    argmax=torch.cat(argmax),
                    topk=type(tops[0]).cat(tops) if tops else None,
                )
            )
        return out

    @torch.no_grad()
    def tops(self, final: Tensor, times: int = 1) -> Tensor:
        """Most likely tokens int64 [M] of final states [M, G] with the final norm applied `times` times."""
        out = []
        for start in range(0, final.shape[0], _HEAD_CHUNK):
            x = final[start : start + _HEAD_CHUNK].to(self.device, self.dtype)
            for _ in range(times):
                x = self.parts.norm(x)
            out.append(self.parts.lm_head(x).argmax(-1).cpu())
        return torch.cat(out)

    @torch.no_grad()
    def own_tops(self, ids: Sequence[int]) -> list[int]:
        """The model's own most likely next token after each position, from its whole forward (no hook of ours)."""
        logits = self.model(input_ids=torch.tensor([list(ids)], device=self.device), use_cache=False).logits
        tops: list[int] = logits[0].argmax(-1).tolist()
        return tops

    @torch.no_grad()
    def all_streams(self, ids: Sequence[int]) -> Tensor:
        """[n + 1, T, G]: streams 0 … n - 1 as transformers reports them (`output_hidden_states`), and stream n, which it
        reports normed only, from the final norm's input. One row, no padding."""
        caught: dict[int, Tensor] = {}
        with self._hooks([self.num_layers], caught):
            batch = torch.tensor([list(ids)], device=self.device)
            found = self.model(input_ids=batch, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        return torch.stack([t[0].cpu() for t in [*found.hidden_states[: self.num_layers], caught[self.num_layers]]])
