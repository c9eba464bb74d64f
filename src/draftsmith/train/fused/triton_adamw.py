"""Triton kernel of the one-pass AdamW. Twin: adamw.update_plain, with the same bits in the 8-bit form."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from draftsmith.train.fused.adamw import FusedAdamW

LANES = tl.constexpr(256)  # layout.BLOCK: one scale of the 8-bit moments
SCRAMBLE = tl.constexpr(0x9E3779B1)


@triton.jit
def _dice(at, count):
    """adamw.dice: two numbers in [0, 1) and one in 0…255 from element and step."""
    h = at.to(tl.uint32) * SCRAMBLE + count.to(tl.uint32) * 0x85EBCA77
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return (h & 0xFFFF).to(tl.float32) / 65536, (h >> 16).to(tl.float32) / 65536, (h & 0xFF).to(tl.int32)


@triton.jit
def _update(
    param, low, grad, m, v, scales, scalars, size, blocks, decayed, b1, b2, eps, decay, SPLIT: tl.constexpr,
    LEAN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    factor = tl.load(scalars + 1)
    if factor == factor:  # not a number: the gradient was not finite, nothing changes
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        inside = at < size
        lr, bias1, bias2 = tl.load(scalars), tl.load(scalars + 2), tl.load(scalars + 3)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
        if SPLIT:
            rest = tl.load(low + at, mask=inside, other=0).to(tl.int32)
            if LEAN:
                rest = rest << 8
            bits = (tl.load(param + at, mask=inside, other=0).to(tl.int32) << 16) + rest
            master = bits.to(tl.float32, bitcast=True)
        else:
            master = tl.load(param + at, mask=inside, other=0.0)
        if LEAN:
            a = tl.load(scales + row, mask=row < blocks, other=0.0)[:, None]
            b = tl.load(scales + blocks + row, mask=row < blocks, other=0.0)[:, None]
            c = tl.load(m + at, mask=inside, other=0).to(tl.float32) / 127
            e = tl.load(v + at, mask=inside, other=0).to(tl.float32) / 255
            first, second = tl.abs(c) * c * a, (e * e) * (e * e) * b
        else:
            first = tl.load(m + at, mask=inside, other=0.0)
            second = tl.load(v + at, mask=inside, other=0.0)
        first = b1 * first + (1 - b1) * g
        second = b2 * second + (1 - b2) * g * g
        master = tl.where(at < decayed, master * (1 - lr * decay), master)
        master = master - lr / bias1 * first / (tl.sqrt(second) / bias2 + eps)
        if LEAN:
            x, y, z = _dice(at, tl.load(scalars + 4))
        if SPLIT:
            bits = master.to(tl.int32, bitcast=True)
            if LEAN:
                bits = ((bits + z) >> 8) << 8
            upper = (bits + 0x8000) >> 16
            tl.store(param + at, upper.to(tl.int16), mask=inside)
            rest = bits - (upper << 16)
            if LEAN:
                rest = rest >> 8
            tl.store(low + at, rest.to(low.dtype.element_ty), mask=inside)
        else:
            tl.store(param + at, master, mask=inside)
        if LEAN:
            a, b = tl.max(tl.abs(first), 1), tl.max(second, 1)
            tl.store(scales + row, a, mask=row < blocks)
            tl.store(scales + blocks + row, b, mask=row < blocks)
            c = tl.floor(tl.sqrt(tl.abs(first) / tl.maximum(a, 1e-38)[:, None]) * 127 + x)
            c = tl.where(first < 0, -1.0, 1.0) * tl.minimum(c, 127.0)
            e = tl.floor(tl.sqrt(tl.sqrt(second / tl.maximum(b, 1e-38)[:, None])) * 255 + y)
            e = tl.where((second > 0) & (e < 1), 1.0, tl.minimum(e, 255.0))
            tl.store(m + at, tl.where(first == 0, 0.0, c).to(tl.int8), mask=inside)
            tl.store(v + at, e.to(tl.uint8), mask=inside)
        else:
            tl.store(m + at, first, mask=inside)
            tl.store(v + at, second, mask=inside)


def update(opt: FusedAdamW, scalars: Tensor) -> None:
    """One kernel over the rank's share of the flat buffers."""
    import torch

    state, size = opt.state, opt.param.numel()
    split = opt.param.dtype == torch.bfloat16
    param = opt.param.view(torch.int16) if split else opt.param
    blocks, rows = size // LANES.value, 8
    _update[(triton.cdiv(blocks, rows),)](
        param, state.get("low", param), opt.grad, state["m"], state["v"], state.get("scales", scalars), scalars, size,
        blocks, opt.decayed, *opt.betas, opt.eps, opt.weight_decay, SPLIT=split, LEAN=opt.lean, ROWS=rows, num_warps=8,
    )  # fmt: skip
