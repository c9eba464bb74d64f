"""Triton kernels of the other row-wise parts: SiLU, rotation, the shifted sum of the embedding's gradient, the gain
behind a product, the running maximum. Twins of the same names: ops_torch.py."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.train.fused.plan import Plan


@triton.jit
def _silu_fwd(gate_up, out, F, stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + F + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_bwd(gate_up, dact, F, stride, d_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    here = gate_up + row * stride + at
    gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(here + F, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dact + row * d_stride + at, mask=inside, other=0.0).to(tl.float32)
    sig = tl.sigmoid(gate)
    silu = gate * sig
    kind = gate_up.dtype.element_ty
    tl.store(here, (d * up * (sig + silu * (1 - sig))).to(kind), mask=inside)
    tl.store(here + F, (d * silu).to(kind), mask=inside)


def silu_mul_fwd(gate_up: Tensor, out: Tensor) -> None:
    R, F = out.shape
    block = min(2048, triton.next_power_of_2(F))
    _silu_fwd[(R, triton.cdiv(F, block))](gate_up, out, F, gate_up.stride(0), out.stride(0), BLOCK=block, num_warps=4)


def silu_mul_bwd(gate_up: Tensor, dact: Tensor) -> None:
    R, F = dact.shape
    block = min(2048, triton.next_power_of_2(F))
    _silu_bwd[(R, triton.cdiv(F, block))](gate_up, dact, F, gate_up.stride(0), dact.stride(0), BLOCK=block, num_warps=4)


@triton.jit
def _rope(
    x, cos, sin, position, step, heads, half, stride, head_stride, BACK: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, HALF)
    angle = (tl.load(position + row) + step) * half + at
    c = tl.load(cos + angle, mask=at < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=at < half, other=0.0).to(tl.float32)[None, :]
    if BACK:
        s = -s
    inside = (head < heads)[:, None] & (at < half)[None, :]
    here = x + row * stride + head[:, None] * head_stride + at[None, :]
    a = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(here + half, mask=inside, other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    tl.store(here, (a * c - b * s).to(kind), mask=inside)
    tl.store(here + half, (b * c + a * s).to(kind), mask=inside)


def rope(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, step: int, back: bool = False) -> None:
    R, heads, _ = x.shape
    half = cos.shape[1]
    group = min(16, triton.next_power_of_2(heads))
    _rope[(R, triton.cdiv(heads, group))](
        x, cos, sin, position, step, heads, half, x.stride(0), x.stride(1), BACK=back, HEADS=group,
        HALF=triton.next_power_of_2(half), num_warps=4,
    )  # fmt: skip


@triton.jit
def _add_kv(dk, dv, into, half, dk_stride, dv_stride, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < half
    here = into + row * 2 * half + at
    key = tl.load(dk + row * dk_stride + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(dv + row * dv_stride + at, mask=inside, other=0.0).to(tl.float32)
    if KEEP:
        key += tl.load(here, mask=inside, other=0.0)
        value += tl.load(here + half, mask=inside, other=0.0)
    tl.store(here, key, mask=inside)
    tl.store(here + half, value, mask=inside)


def add_kv(dk: Tensor, dv: Tensor, into: Tensor, keep: bool) -> None:
    T, half = into.shape[0], into.shape[1] // 2
    dk, dv = dk.reshape(T, half), dv.reshape(T, half)
    block = min(2048, triton.next_power_of_2(half))
    _add_kv[(T, triton.cdiv(half, block))](
        dk, dv, into, half, dk.stride(0), dv.stride(0), KEEP=keep, BLOCK=block, num_warps=4
    )


@triton.jit
def _shift_sum(
    dq, dkv, inverse, out, T, R, K, Nq, Nkv, COMPACT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_q, inside = at < Nq, at < Nq + Nkv
    is_kv = inside & (at >= Nq)
    own = tl.load(dkv + row.to(tl.int64) * Nkv + at - Nq, mask=is_kv & (at * 0 + row < T), other=0.0)
    total = own.to(tl.float32)
    for s in range(K):
        t = row - s
        known = (t >= 0) & (t < T)
        there = tl.minimum(tl.maximum(t, 0), T - 1)
        r = tl.where(known, tl.load(inverse + there) if COMPACT else t, -1)
        block = (s + K - 1) % K if COMPACT else s
        q_row = (block * R + r).to(tl.int64)
        total += tl.load(dq + q_row * Nq + at, mask=is_q & (at * 0 + r >= 0), other=0.0).to(tl.float32)
        later = at * 0 + tl.where(s > 0, r, -1) >= 0
        kv_row = (T + (s - 1) * R + r).to(tl.int64)
        total += tl.load(dkv + kv_row * Nkv + at - Nq, mask=is_kv & later, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * (Nq + Nkv) + at, total.to(out.dtype.element_ty), mask=inside)


def shift_sum(dq: Tensor, dkv: Tensor, out: Tensor, plan: Plan) -> None:
    Nq, Nkv = dq.shape[1], dkv.shape[1]
    block = min(2048, triton.next_power_of_2(Nq + Nkv))
    inverse: Any = dq if plan.inverse is None else plan.inverse
    _shift_sum[(out.shape[0], triton.cdiv(Nq + Nkv, block))](
        dq, dkv, inverse, out, plan.T, plan.R, plan.K, Nq, Nkv, COMPACT=plan.compact, BLOCK=block, num_warps=4
    )


@triton.jit
def _through_norm(
    w, m, gain, partial, rows, C, w_stride, m_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < C
    g = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, ROWS, STEP):
        row = (tl.program_id(0) * ROWS + i + tl.arange(0, STEP)).to(tl.int64)
        mask = (row < rows)[:, None] & inside[None, :]
        value = tl.load(m + row[:, None] * m_stride + at[None, :], mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(w + row[:, None] * w_stride + at[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(value * weight, 0)
        tl.store(m + row[:, None] * m_stride + at[None, :], (value * g).to(m.dtype.element_ty), mask=mask)
    tl.store(partial + tl.program_id(0).to(tl.int64) * C + at, total, mask=inside)


def through_norm(w: Tensor, m: Tensor, gain: Tensor, dgain: Tensor) -> None:
    total, C = w.shape
    rows, block = 128, min(512, triton.next_power_of_2(C))
    grid = (triton.cdiv(total, rows), triton.cdiv(C, block))
    partial = torch.empty(grid[0], C, dtype=torch.float32, device=w.device)
    _through_norm[grid](
        w, m, gain, partial, total, C, w.stride(0), m.stride(0), ROWS=rows, BLOCK=block, STEP=8, num_warps=4
    )
    dgain += partial.sum(0)


@triton.jit
def _running_max(logits, best, arg, first, C, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(best + row)
    where = tl.load(arg + row)
    for i in range(0, C, BLOCK):
        at = i + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + at, mask=at < C, other=float("-inf")).to(tl.float32)
        block_top = tl.max(value, 0)
        block_arg = tl.min(tl.where(value == block_top, at, C), 0)
        better = block_top > top
        where = tl.where(better, (block_arg + first).to(tl.int64), where)
        top = tl.where(better, block_top, top)
    tl.store(best + row, top)
    tl.store(arg + row, where)


def running_max(logits: Tensor, first: int, best: Tensor, arg: Tensor) -> None:
    M, C = logits.shape
    block = min(8192, triton.next_power_of_2(C))
    _running_max[(M,)](logits, best, arg, first, C, logits.stride(0), BLOCK=block, num_warps=8)
