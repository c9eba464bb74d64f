"""AdamW over the flat buffers of layout.FlatParams: clip, decay, moments and master weights in one pass.

bfloat16 parameters keep their float32 master in two parts: the parameter itself is the upper one (rounded), `low` holds
the difference of the two bit patterns, int16 and therefore exact. That is 2 bytes a parameter for what others spend 4
on. Bytes a parameter beside the bf16 weight and gradient:

  adamw  2 + 4 + 4: exact master, float32 moments
  lean   1 + 1 + 1: 24-bit master (int8 `low`), moments as 8-bit codes with a float32 scale per block of 256; what is
         cut off is rounded stochastically, so that slow averages and small updates do not get stuck

float32 parameters are their own masters.

Everything that changes from step to step (count, rate, clip factor) is a device scalar: the step never waits for the
device, and a captured graph can be replayed. A step whose gradient is not finite changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith.train.fused.layout import BLOCK, FlatRegion
from draftsmith.train.fused.ops import use_triton

REDUCE = 1 << 26
"""Elements that are reduced over the ranks at a time."""


class FlatSlice:
    """One rank's part of flat parameters and gradients (all of them, where nothing is sharded).

    group: reduce gradients (sum) over this process group; shard: each rank moves 1/world of the parameters and gathers
    the rest (flat needs multiple = world * BLOCK)."""

    def __init__(self, flat: FlatRegion, group: Any, shard: bool) -> None:
        self.flat, self.group, self.shard = flat, group, shard
        self.start, size = 0, flat.numel
        if shard:
            world, rank = dist.get_world_size(group), dist.get_rank(group)
            if flat.numel % (world * BLOCK):
                raise ValueError(f"{flat.numel} elements do not split into blocks over {world} ranks")
            size //= world
            self.start = rank * size
        self.param, self.grad = (x[self.start : self.start + size] for x in (flat.param, flat.grad))

    def reduce(self) -> Tensor:
        """Gradients over the ranks, then the norm of all of them."""
        if self.group is not None:
            self._sum()
        wide = torch.promote_types(self.grad.dtype, torch.float32)
        norm = torch.linalg.vector_norm(self.grad, dtype=wide)
        if self.shard:
            squared = norm.square()
            dist.all_reduce(squared, group=self.group)
            norm = squared.sqrt()
        return norm

    def _sum(self) -> None:
        """Sum the gradient over the ranks in float32 (or better), rounded to the buffer's type once: summed in bfloat16,
        what is small beside the largest rank's part is lost at every hop. In slices, so that no float32 copy of all of
        it exists."""
        wide = torch.promote_types(self.grad.dtype, torch.float32)
        if not self.shard:
            for part in self.flat.grad.split(REDUCE):
                total = part.to(wide)
                dist.all_reduce(total, group=self.group)
                part.copy_(total)
            return
        world = dist.get_world_size(self.group)
        by_rank = self.flat.grad.view(world, -1)
        for at in range(0, by_rank.shape[1], REDUCE // world):
            part = by_rank[:, at : at + REDUCE // world]
            mine = torch.empty(part.shape[1], dtype=wide, device=part.device)
            dist.reduce_scatter_tensor(mine, part.to(wide).flatten(), group=self.group)
            self.grad[at : at + part.shape[1]].copy_(mine)

    def gather(self) -> None:
        """The parameters that other ranks have moved."""
        if self.shard:
            dist.all_gather_into_tensor(self.flat.param, self.param.clone(), group=self.group)


class FusedAdamW(FlatSlice):
    """betas, eps, weight_decay (matrices only), clip: as in torch.optim.AdamW with clip_grad_norm_ before it.

    lean: 8-bit moments. group: reduce gradients (sum) over this process group; shard: each rank keeps the moments of
    1/world of the parameters, updates those and gathers the rest (FlatParams needs multiple = world * BLOCK).
    """

    def __init__(
        self,
        flat: FlatRegion,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        clip: float = 1.0,
        lean: bool = False,
        group: Any = None,
        shard: bool = False,
    ) -> None:
        super().__init__(flat, group, shard)
        self.betas, self.eps, self.weight_decay, self.clip, self.lean = betas, eps, weight_decay, clip, lean
        size = self.param.numel()
        self.decayed = min(max(flat.decayed - self.start, 0), size)
        device, dtype = flat.param.device, flat.param.dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.state: dict[str, Tensor] = {"count": torch.zeros(1, dtype=torch.float64, device=device)}
        if dtype == torch.bfloat16:
            self.state["low"] = torch.zeros(size, dtype=torch.int8 if lean else torch.int16, device=device)
        if lean:
            self.state["m"] = torch.zeros(size, dtype=torch.int8, device=device)
            self.state["v"] = torch.zeros(size, dtype=torch.uint8, device=device)
            self.state["scales"] = torch.zeros(2, size // BLOCK, dtype=torch.float32, device=device)
        else:
            self.state["m"] = torch.zeros(size, dtype=wide, device=device)
            self.state["v"] = torch.zeros(size, dtype=wide, device=device)
        self.lr = torch.zeros(1, dtype=torch.float64, device=device)

    def set_lr(self, lr: float) -> None:
        self.lr.fill_(lr)

    @torch.no_grad()
    def step(self, lr: float | None = None) -> Tensor:
        """One update; returns the gradient norm before clipping (device scalar). lr None: as set by `set_lr`."""
        if lr is not None:
            self.set_lr(lr)
        norm = self.reduce()
        self.move(norm)
        return norm

    def move(self, norm: Tensor) -> Tensor:
        """The update, once the gradients are summed and their norm is known; returns its scalars (`_scalars`)."""
        self.state["count"] += torch.isfinite(norm)
        scalars = self._scalars(norm)
        if use_triton(self.param.device):
            from draftsmith.train.fused.triton_adamw import update
        elif self.param.dtype != torch.bfloat16 and not self.lean:
            update = _update_library
        else:
            update = update_plain
        update(self, scalars)
        self.gather()
        return scalars

    def _scalars(self, norm: Tensor) -> Tensor:
        """[lr, factor on the gradient (NaN = skip), 1 - beta1^t, sqrt(1 - beta2^t), t] in float32 or better."""
        count = self.state["count"]
        factor = (self.clip / (norm + 1e-6)).clamp_max(1.0)
        factor = torch.where(torch.isfinite(norm), factor, torch.nan)
        b1, b2 = self.betas
        parts = [self.lr, factor.reshape(1).double(), 1 - b1**count, (1 - b2**count).sqrt(), count]
        return torch.cat(parts).to(torch.promote_types(self.param.dtype, torch.float32))

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that resuming bit for bit needs, beside the parameters."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """ValueError if the state is of another optimizer form or size."""
        load_state(self.state, state)


def load_state(own: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Copy what was saved into an optimizer's own tensors. ValueError if it is of another form or size."""
    for name, mine in own.items():
        theirs = saved.get(name)
        if theirs is None or theirs.shape != mine.shape or theirs.dtype != mine.dtype:
            raise ValueError(f"optimizer state {name!r} does not fit: saved by another optimizer, dtype or sharding")
        mine.copy_(theirs)


def join_master(param: Tensor, low: Tensor) -> Tensor:
    """bf16 upper parts and int16 (or int8: of the next 8 bits) differences → float32 masters."""
    upper = param.view(torch.int16).int() << 16
    return (upper + (low.int() << 8 if low.dtype == torch.int8 else low.int())).view(torch.float32)


def split_master(master: Tensor, param: Tensor, low: Tensor, dice: Tensor | None = None) -> None:
    """float32 masters → bf16 (rounded, ties up in bits) and the difference. An int8 `low` cuts 8 bits off, by the
    dice (int32, 0…255): the mean is kept."""
    bits = master.view(torch.int32)
    if low.dtype == torch.int8:
        assert dice is not None
        bits = (bits + dice) >> 8 << 8
    upper = (bits + 0x8000) >> 16
    param.view(torch.int16).copy_(upper)
    rest = bits - (upper << 16)
    low.copy_(rest >> 8 if low.dtype == torch.int8 else rest)


def dice(size: int, count: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Two uniform numbers in [0, 1) and one in 0…255 per element from (element, step), by a 32-bit mixing function
    (murmur3's). The last is the fine end of the first."""
    mask = 0xFFFFFFFF
    h = torch.arange(size, device=device) * 0x9E3779B1 + count.long() * 0x85EBCA77 & mask
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * factor & mask
    h = h ^ (h >> 16)
    return (h & 0xFFFF).float() / 65536, (h >> 16).float() / 65536, (h & 0xFF).int()


def decode(m: Tensor, v: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit codes → moments: m = sign c² a, v = c⁴ b, with c in [-1, 1] or [0, 1] and a, b per block."""
    a, b = scales[0, :, None], scales[1, :, None]
    c = m.view(-1, BLOCK).float() / 127
    d = v.view(-1, BLOCK).float() / 255
    return (c.abs() * c * a).flatten(), ((d * d) * (d * d) * b).flatten()


def encode(m: Tensor, v: Tensor, u: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moments → codes and scales; u, w: the dice. A v above zero never becomes zero (it divides)."""
    a, b = m.view(-1, BLOCK).abs().amax(1), v.view(-1, BLOCK).amax(1)
    safe_a, safe_b = (x.clamp_min(1e-38)[:, None] for x in (a, b))
    c = ((m.view(-1, BLOCK).abs() / safe_a).sqrt() * 127 + u.view(-1, BLOCK)).floor().clamp_max(127)
    d = ((v.view(-1, BLOCK) / safe_b).sqrt().sqrt() * 255 + w.view(-1, BLOCK)).floor().clamp(0, 255)
    d = torch.where((v.view(-1, BLOCK) > 0) & (d < 1), 1.0, d)
    codes = (c * m.view(-1, BLOCK).sign()).to(torch.int8).flatten(), d.to(torch.uint8).flatten()
    return *codes, torch.stack([a, b])


def update_plain(opt: FusedAdamW, scalars: Tensor) -> None:
    """The update in plain torch: any parameter type, with or without 8-bit moments. The kernel's reference."""
    if bool(scalars[1].isnan()):
        return
    lr, factor, bias1, bias2, count = scalars.unbind()
    state, b1, b2 = opt.state, *opt.betas
    split = opt.param.dtype == torch.bfloat16
    master = join_master(opt.param, state["low"]) if split else opt.param.clone()
    grad = opt.grad.to(master.dtype) * factor
    m, v = decode(state["m"], state["v"], state["scales"]) if opt.lean else (state["m"], state["v"])
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad * grad
    master[: opt.decayed] *= 1 - lr * opt.weight_decay
    master -= lr / bias1 * m / (v.sqrt() / bias2 + opt.eps)
    rolls = dice(m.numel(), count, m.device) if opt.lean else None
    if split:
        split_master(master, opt.param, state["low"], rolls[2] if rolls else None)
    else:
        opt.param.copy_(master)
    if rolls:
        m, v, scales = encode(m, v, *rolls[:2])
        state["scales"].copy_(scales)
    state["m"].copy_(m)
    state["v"].copy_(v)


def _update_library(opt: FusedAdamW, scalars: Tensor) -> None:
    """float32 and float64 on a CPU: torch's own fused kernel, once for what is decayed and once for the rest."""
    lr, factor = float(scalars[0]), scalars[1]
    skip, factor = factor.isnan().float(), factor.float()
    b1, b2 = opt.betas
    for part, decay in ((slice(0, opt.decayed), opt.weight_decay), (slice(opt.decayed, None), 0.0)):
        param, grad, m, v = (x[part] for x in (opt.param, opt.grad, opt.state["m"], opt.state["v"]))
        if param.numel():
            torch._fused_adamw_(
                [param], [grad], [m], [v], [], [scalars[4].float()], lr=lr, beta1=b1, beta2=b2, weight_decay=decay,
                eps=opt.eps, amsgrad=False, maximize=False, grad_scale=1.0 / factor, found_inf=skip,
            )  # fmt: skip
