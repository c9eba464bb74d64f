"""What computes and moves the weights, behind one face: the loop, the checkpoints and the tests do not know which.

    HandCore       the hand-written step of fused/ over flat buffers; on several ranks its optimizer is sharded
    ReferenceCore  the objective in autograd with torch's AdamW: the MLA form, and what the other is compared with
    parallel.py    ReferenceCore over several ranks by FSDP2

A core's `state()` is its live tensors by name, everything that an exact resume needs. They exist from the start, so a
resume copies into them in place; then `loaded()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from draftsmith.drafter.model import Drafter
from draftsmith.errors import UserError
from draftsmith.recipe import TrainSection
from draftsmith.train.batch import StepBatch
from draftsmith.train.fused.adamw import FusedAdamW
from draftsmith.train.fused.layout import BLOCK, FlatParams
from draftsmith.train.fused.muon import FusedMuon
from draftsmith.train.fused.step import FusedStep
from draftsmith.train.objective import StepStats, TargetHead, reference_loss

MULTIPLE = 64 * BLOCK
"""Flat buffers are padded to this, so that they have one length on 1, 2, 4 … 64 ranks and a resume may change them."""


HAND_ONLY = {
    "adamw-lean": "8-bit moments are kept by the hand-written step alone; leaving them out would double the forecast memory",
    "muon": "orthogonal updates are made by the hand-written step alone; AdamW's are others and want other rates",
}
"""Optimizers that the reference has not, and why it matters."""


class Core(Protocol):
    """model: the drafter whose weights it moves."""

    model: Drafter

    def step(self, batch: StepBatch, K: int, weights: Sequence[float], counts: Tensor) -> tuple[Tensor, StepStats]:
        """Loss (this rank's share) and figures of one pack; gradients are kept. counts: of the whole optimizer step."""
        ...

    def update(self, lr: float, clip: float) -> Tensor:
        """Sum gradients over ranks, clip to a global norm, move the weights; returns the norm before clipping."""
        ...

    def state(self) -> dict[str, Tensor]: ...

    def loaded(self) -> None: ...

    def whole(self) -> Any:
        """Context in which `model` holds all its weights (sharded ones are gathered)."""
        ...


class ReferenceCore:
    """Autograd and torch's AdamW. A bf16 parameter has 8 bits, an update below 1/256 of it would be lost: then the
    optimizer moves float32 masters and the parameters follow. Matrices decay, vectors (norms, biases) do not.

    recompute: each draft step is computed again in the backward pass, so memory does not grow with K."""

    def __init__(self, model: Drafter, head: TargetHead | None, section: TrainSection, recompute: bool = False) -> None:
        self.model, self.head, self.recompute = model, head, recompute
        self._adam(section)

    def _adam(self, section: TrainSection) -> None:
        self.named = self.model.trained()
        wide = [p.dtype in (torch.float32, torch.float64) for _, p in self.named]
        pairs = zip(self.named, wide, strict=True)
        self.masters: list[Tensor] = [p if w else p.detach().float().requires_grad_() for (_, p), w in pairs]
        groups: list[dict[str, Any]] = [
            {
                "params": [m for m in self.masters if (m.dim() > 1) == decays],
                "weight_decay": section.weight_decay * decays,
            }
            for decays in (True, False)
        ]
        plain = all(type(m) in (Tensor, nn.Parameter) for m in self.masters)
        kind: dict[str, Any] = {"fused": True} if plain else {"foreach": True}
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=section.betas, **kind)
        for m in self.masters:
            self.adam.state[m] = {
                "step": torch.zeros((), device=m.device if plain else None),
                "exp_avg": torch.zeros_like(m),
                "exp_avg_sq": torch.zeros_like(m),
            }

    def step(self, batch: StepBatch, K: int, weights: Sequence[float], counts: Tensor) -> tuple[Tensor, StepStats]:
        loss, stats = reference_loss(self.model, batch, K, weights, self.head, counts, recompute=self.recompute)
        if loss.requires_grad:
            loss.backward()
        return loss.detach(), stats

    def update(self, lr: float, clip: float) -> Tensor:
        for (_, p), m in zip(self.named, self.masters, strict=True):
            if m is not p:
                m.grad = None if p.grad is None else p.grad.float()
                p.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters, clip)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.loaded()
        self.adam.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for (name, _), m in zip(self.named, self.masters, strict=True):
            out[f"weight.{name}"] = m.detach()
            out |= {f"{key}.{name}": value for key, value in self.adam.state[m].items()}
        return out

    def loaded(self) -> None:
        with torch.no_grad():
            for (_, p), m in zip(self.named, self.masters, strict=True):
                if m is not p:
                    p.copy_(m)

    @contextmanager
    def whole(self) -> Iterator[Drafter]:
        yield self.model


class HandCore:
    """The hand-written step. The model's parameters and gradients are views of its flat buffers. group: process group
    of several ranks; each keeps 1/n of the moments (fused/adamw.py)."""

    def __init__(self, model: Drafter, head: TargetHead | None, section: TrainSection, group: Any = None) -> None:
        self.model, self.group = model, group
        weight = model.fc.weight
        own = model.embed_tokens is not None and model.embed_tokens.weight.requires_grad
        muon = section.optimizer == "muon"
        self.flat = FlatParams(model.config, weight.device, weight.dtype, own, MULTIPLE, split=muon)
        self.flat.load(dict(model.named_parameters()))
        self.flat.bind(model)
        table = model.lent_embedding if model.embed_tokens is None else model.embed_tokens.weight.detach()
        self.fused = FusedStep(self.flat, head, table, model.t2d)
        kind = FusedMuon if muon else partial(FusedAdamW, lean=section.optimizer == "adamw-lean")
        self.adam: FusedMuon | FusedAdamW = kind(
            self.flat,
            betas=section.betas,
            weight_decay=section.weight_decay,
            clip=section.clip,
            group=group,
            shard=group is not None,
        )

    def step(self, batch: StepBatch, K: int, weights: Sequence[float], counts: Tensor) -> tuple[Tensor, StepStats]:
        return self.fused.loss_and_grads(batch, self.fused.plan(batch, K), weights, counts)

    def update(self, lr: float, clip: float) -> Tensor:
        self.adam.clip = clip
        return self.adam.step(lr)

    def state(self) -> dict[str, Tensor]:
        out = {"flat.param": self.flat.param}
        for name, value in self.adam.state_dict().items():
            out[f"flat.{name}"] = value if name == "count" else self._sharded(value)
        return out

    def _sharded(self, value: Tensor) -> Tensor:
        """This rank's part of a moment, as a part of the whole (its last dimension is split over the ranks)."""
        if self.group is None:
            return value
        from torch.distributed.tensor import DTensor, Shard

        from draftsmith.train.parallel import mesh

        return DTensor.from_local(value, mesh(value.device.type), [Shard(value.dim() - 1)])

    def loaded(self) -> None:
        pass

    @contextmanager
    def whole(self) -> Iterator[Drafter]:
        yield self.model


def build(model: Drafter, head: TargetHead | None, section: TrainSection, *, hand: bool = True) -> Core:
    """The core for a model that is on its device, in its type, with its weights and embedding.

    UserError where an optimizer of the hand-written step is asked for and another step serves.
    The hand-written step serves the Llama form; the MLA form, train.recompute and `hand=False` run the reference. Where a process
    group is up, its ranks train together."""
    from draftsmith.train.parallel import Ranks, ShardedCore

    ranks = Ranks.current()
    if hand and model.config.form == "llama" and not section.recompute:
        return HandCore(model, head, section, None if ranks.count == 1 else torch.distributed.group.WORLD)
    if section.optimizer != "adamw":
        raise UserError(
            f"train.optimizer is {section.optimizer}, which the "
            + ("recomputing step" if section.recompute else f"step of form {model.config.form}")
            + " does not have",
            HAND_ONLY[section.optimizer],
            "set train.optimizer: adamw" + (", or train.recompute: false" if section.recompute else ""),
        )
    if ranks.count > 1:
        return ShardedCore(model, head, section, section.recompute)
    return ReferenceCore(model, head, section, section.recompute)
