"""Muon for the hidden matrices, AdamW for the rest, over the flat buffers of layout.FlatParams(split=True).

A matrix moves by its momentum made (nearly) orthogonal: every direction of the update has the same length, so directions
in which the gradient is small are learnt as fast as the others (Jordan et al. 2024, "Muon"). Scaled by
0.2 sqrt(longer side) an update is as long as AdamW's, whose learning rate and decay then serve both (Liu et al. 2025,
arXiv 2502.16982, section 2.2). lm_head, embedding, norms and biases are AdamW's: one row of a head belongs to one token.

Hidden matrices keep one moment instead of two: 4 bytes a parameter less than AdamW.

On several ranks each keeps the momentum of its slice. What is to be made orthogonal must be whole: the slices are
gathered into the gradient's buffer (its gradients are used up by then), each rank takes its share of the matrices, and
sends them round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith.train.fused.adamw import FlatSlice, FusedAdamW, join_master, load_state, split_master
from draftsmith.train.fused.layout import FlatParams

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
"""Of the quintic iteration; singular values then lie between about 0.7 and 1.2, which serves as well as 1."""
LENGTH = 0.2
"""Root mean square of an update's elements, as AdamW's usually is."""
CHUNK = 1 << 24
"""Elements that are moved at a time: bounds what float32 copies take."""


def orthogonal(x: Tensor) -> Tensor:
    """x [r, c] → nearly U V^T of its singular value decomposition; bfloat16 on a GPU, else float32 or better."""
    a, b, c = COEFFICIENTS
    kind = torch.bfloat16 if x.is_cuda else torch.promote_types(x.dtype, torch.float32)
    y = (x.T if x.shape[0] > x.shape[1] else x).to(kind)
    norm = torch.linalg.vector_norm(y, dtype=torch.promote_types(kind, torch.float32))
    y = (y / norm.clamp_min(1e-7)).to(kind)  # the largest singular value is at most 1
    for _ in range(STEPS):
        square = y @ y.T
        y = torch.addmm(y, torch.addmm(square, square, square, beta=b, alpha=c), y, beta=a)
    return y.T if x.shape[0] > x.shape[1] else y


@dataclass(frozen=True)
class _Matrix:
    """One hidden matrix: its view in the gradient's buffer, the rank that makes it orthogonal."""

    update: Tensor
    owner: int


class FusedMuon:
    """As FusedAdamW (same arguments, without `lean`). flat: made with split=True."""

    def __init__(
        self,
        flat: FlatParams,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        clip: float = 1.0,
        group: Any = None,
        shard: bool = False,
    ) -> None:
        hidden, rest = flat.regions()
        self.weight_decay, self.shard, self.group = weight_decay, shard, group
        self.rest = FusedAdamW(
            rest, betas=betas, eps=eps, weight_decay=weight_decay, clip=clip, group=group, shard=shard
        )
        self.hidden = FlatSlice(hidden, group, shard)
        param = self.hidden.param
        wide = torch.promote_types(param.dtype, torch.float32)
        self._own: dict[str, Tensor] = {"momentum": torch.zeros(param.numel(), dtype=wide, device=param.device)}
        if param.dtype == torch.bfloat16:
            self._own["hidden_low"] = torch.zeros(param.numel(), dtype=torch.int16, device=param.device)
        ranks = dist.get_world_size(group) if shard else 1
        self.matrices = _shared_out([flat.grads[n] for n in flat.hidden_names], ranks)

    @property
    def clip(self) -> float:
        return self.rest.clip

    @clip.setter
    def clip(self, value: float) -> None:
        self.rest.clip = value

    @property
    def state(self) -> dict[str, Tensor]:
        return self.rest.state | self._own

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that resuming bit for bit needs, beside the parameters."""
        return self.state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """ValueError if the state is of another optimizer form or size."""
        load_state(self.state, state)

    def set_lr(self, lr: float) -> None:
        self.rest.set_lr(lr)

    @torch.no_grad()
    def step(self, lr: float | None = None) -> Tensor:
        """One update; returns the gradient norm before clipping (device scalar). lr None: as set by `set_lr`."""
        if lr is not None:
            self.set_lr(lr)
        norm = (self.hidden.reduce().square() + self.rest.reduce().square()).sqrt()
        scalars = self.rest.move(norm)
        lr_now, factor = scalars[0], scalars[1]
        self._mix(factor)
        self._make_orthogonal()
        self._apply(lr_now, ~factor.isnan())
        return norm

    def _mix(self, factor: Tensor) -> None:
        """Momentum of this rank's slice, and Nesterov's step ahead of it in the place of the gradient."""
        sound = ~factor.isnan()
        for grad, kept in zip(self.hidden.grad.split(CHUNK), self._own["momentum"].split(CHUNK), strict=True):
            g = grad.to(kept.dtype) * factor
            mixed = torch.lerp(kept, g, 1 - MOMENTUM)
            kept.copy_(torch.where(sound, mixed, kept))
            grad.copy_(torch.lerp(g, mixed, MOMENTUM))
        if self.shard:
            dist.all_gather_into_tensor(self.hidden.flat.grad, self.hidden.grad.clone(), group=self.group)

    def _make_orthogonal(self) -> None:
        me = dist.get_rank(self.group) if self.shard else 0
        for m in self.matrices:
            if m.owner == me:
                m.update.copy_(orthogonal(m.update) * (LENGTH * max(m.update.shape) ** 0.5))
        if self.shard:
            for m in self.matrices:
                dist.broadcast(m.update, group=self.group, group_src=m.owner)

    def _apply(self, lr: Tensor, sound: Tensor) -> None:
        low = self._own.get("hidden_low")
        params = self.hidden.param.split(CHUNK)
        lows = low.split(CHUNK) if low is not None else [None] * len(params)
        for param, rest, update in zip(params, lows, self.hidden.grad.split(CHUNK), strict=True):
            master = param.clone() if rest is None else join_master(param, rest)
            moved = master * (1 - lr * self.weight_decay) - lr * update.to(master.dtype)
            moved = torch.where(sound, moved, master)
            if rest is None:
                param.copy_(moved)
            else:
                split_master(moved, param, rest)
        self.hidden.gather()


def _shared_out(updates: list[Tensor], ranks: int) -> list[_Matrix]:
    """The costliest first, each to the rank that has least to do so far."""
    load = [0] * ranks
    out = []
    for update in sorted(updates, key=_cost, reverse=True):
        owner = load.index(min(load))
        load[owner] += _cost(update)
        out.append(_Matrix(update, owner))
    return out


def _cost(x: Tensor) -> int:
    return min(x.shape) * x.numel()
