"""Triton kernels of RMSNorm. One program walks several rows; a row is one block. Twins: ops_torch.norm_fwd/norm_bwd."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528  # four per multiprocessor of a Hopper GPU: enough to fill it, few enough partial sums of dw


@triton.jit
def _norm_fwd(
    x, w, out, index, H, x_stride, out_stride, eps, GAIN: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(index + row) if INDEX else row
    at = tl.arange(0, BLOCK)
    inside = at < H
    value = tl.load(x + source * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    if GAIN:
        value = value * tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_bwd(
    dy, x, w, add, out, y_out, index, partial, R, H, dy_stride, x_stride, add_stride, out_stride, y_stride, eps,
    ADD: tl.constexpr, KEEP: tl.constexpr, INDEX: tl.constexpr, Y: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < H
    gain = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    dgain = tl.zeros([BLOCK], tl.float32)
    for i in range(first, R, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        place = tl.load(index + row) if INDEX else row
        value = tl.load(x + place * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + row * dy_stride + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
        hat = value * scale
        dgain += grad * hat
        inner = grad * gain
        dx = (inner - hat * (tl.sum(inner * hat, 0) / H)) * scale
        if ADD:
            dx += tl.load(add + row * add_stride + at, mask=inside, other=0.0).to(tl.float32)
        if KEEP:
            dx += tl.load(out + place * out_stride + at, mask=inside, other=0.0).to(tl.float32)
        if Y:
            tl.store(y_out + row * y_stride + at, (hat * gain).to(y_out.dtype.element_ty), mask=inside)
        tl.store(out + place * out_stride + at, dx.to(out.dtype.element_ty), mask=inside)
    tl.store(partial + first.to(tl.int64) * H + at, dgain, mask=inside)


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


def norm_fwd(x: Tensor, w: Tensor | None, eps: float, out: Tensor, index: Tensor | None = None) -> None:
    R, H = out.shape
    block = triton.next_power_of_2(H)
    _norm_fwd[(R,)](
        x, out if w is None else w, out, out if index is None else index, H, x.stride(0), out.stride(0), eps,
        GAIN=w is not None, INDEX=index is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def norm_bwd(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    eps: float,
    out: Tensor,
    dw: Tensor,
    add: Tensor | None = None,
    keep: bool = False,
    index: Tensor | None = None,
    y_out: Tensor | None = None,
) -> None:
    R, H = dy.shape
    block = triton.next_power_of_2(H)
    programs = min(R, PROGRAMS)
    partial = torch.empty(programs, H, dtype=torch.float32, device=dy.device)
    extra, y = (out if t is None else t for t in (add, y_out))
    _norm_bwd[(programs,)](
        dy, x, w, extra, out, y, out if index is None else index, partial, R, H,
        dy.stride(0), x.stride(0), extra.stride(0), out.stride(0), y.stride(0), eps,
        ADD=add is not None, KEEP=keep, INDEX=index is not None, Y=y_out is not None, BLOCK=block,
        num_warps=_warps(block),
    )  # fmt: skip
    dw += partial.sum(0)
