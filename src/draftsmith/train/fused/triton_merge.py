"""Triton kernels that join the step-0 attention with a row's own keys of later steps, forward and backward.

One program serves one row and one key head with the query heads that share it. Twins: ops_torch.merge/merge_bwd,
where shapes and meaning are described."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from draftsmith.train.fused.plan import Plan


@triton.jit
def _own_key(kv, row, j, T, R, head, m, d, at):
    """Key and value of step j >= 1 of a row: [1, d] each."""
    base = kv + (T + (j - 1) * R + row).to(tl.int64) * (2 * m * d) + head * d + at[None, :]
    inside = (at < d)[None, :]
    key = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    return key, tl.load(base + m * d, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _merge(
    q, kv, out0, lse, out, active, s, T, R, L, n, m, d, scale, COMPACT: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    t = tl.load(active + row).to(tl.int64) if COMPACT else row.to(tl.int64)
    h, at = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    inside = (h < GROUP)[:, None] & (at < d)[None, :]
    here = row.to(tl.int64) * n * d + (head * GROUP + h)[:, None] * d + at[None, :]
    there = t * n * d + (head * GROUP + h)[:, None] * d + at[None, :]
    query = tl.load(q + here, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(out0 + there, mask=inside, other=0.0).to(tl.float32)
    lse_at = lse + ((t // L) * n + head * GROUP + h) * L + t % L
    top = tl.load(lse_at, mask=h < GROUP, other=0.0)
    mass = tl.full([HEADS], 1.0, tl.float32)
    for j in range(1, s + 1):
        key, value = _own_key(kv, row, j, T, R, head, m, d, at)
        score = tl.sum(query * key, 1) * scale
        higher = tl.maximum(top, score)
        old, new = tl.exp(top - higher), tl.exp(score - higher)
        total = total * old[:, None] + new[:, None] * value
        mass = mass * old + new
        top = higher
    tl.store(out + here, (total / mass[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse_at, top + tl.log(mass), mask=h < GROUP)


def merge(q: Tensor, kv: Tensor, out0: Tensor, lse: Tensor, out: Tensor, plan: Plan, s: int, scale: float) -> None:
    R, n, d = q.shape
    m = kv.shape[2]
    assert q.is_contiguous() and out.is_contiguous() and lse.is_contiguous()
    active: Any = q if plan.active is None else plan.active
    _merge[(R, m)](
        q, kv, out0.contiguous(), lse, out, active, s, plan.T, R, lse.shape[2], n, m, d, scale, COMPACT=plan.compact,
        GROUP=n // m, HEADS=triton.next_power_of_2(n // m), WIDTH=triton.next_power_of_2(d), num_warps=1,
    )  # fmt: skip


@triton.jit
def _weights(
    q, out, dout, lse, key, value, block_row, t, L, n, d, head, scale, h, at, GROUP: tl.constexpr
):  # fmt: skip
    """p and dscore [HEADS] of one own key under one step's queries, and those queries and their dout."""
    inside = (h < GROUP)[:, None] & (at < d)[None, :]
    here = block_row.to(tl.int64) * n * d + (head * GROUP + h)[:, None] * d + at[None, :]
    query = tl.load(q + here, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dout + here, mask=inside, other=0.0).to(tl.float32)
    shared = tl.sum(grad * tl.load(out + here, mask=inside, other=0.0).to(tl.float32), 1)
    logsum = tl.load(lse + ((t // L) * n + head * GROUP + h) * L + t % L, mask=h < GROUP, other=0.0)
    p = tl.where(h < GROUP, tl.exp(tl.sum(query * key, 1) * scale - logsum), 0.0)
    return p, p * (tl.sum(grad * value, 1) - shared) * scale, query, grad


@triton.jit
def _merge_bwd(
    q, kv, out, dout, lses, dq0, dq, active, s, T, R, K, L, n, m, d, scale, lse_stride, COMPACT: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    t = tl.load(active + row).to(tl.int64) if COMPACT else row.to(tl.int64)
    h, at = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    inside = (h < GROUP)[:, None] & (at < d)[None, :]
    block = (s + K - 1) % K if COMPACT else s
    here = (block * R + row).to(tl.int64) * n * d + (head * GROUP + h)[:, None] * d + at[None, :]
    total = tl.load(dq0 + t * n * d + (head * GROUP + h)[:, None] * d + at[None, :], mask=inside, other=0.0)
    total = total.to(tl.float32)
    for j in range(1, s + 1):
        key, value = _own_key(kv, row, j, T, R, head, m, d, at)
        _, dscore, _, _ = _weights(
            q, out, dout, lses + s * lse_stride, key, value, block * R + row, t, L, n, d, head, scale, h, at, GROUP
        )
        total += dscore[:, None] * key
    tl.store(dq + here, total.to(dq.dtype.element_ty), mask=inside)
    if s > 0:
        key, value = _own_key(kv, row, s, T, R, head, m, d, at)
        dkey = tl.zeros([WIDTH], tl.float32)
        dvalue = tl.zeros([WIDTH], tl.float32)
        for later in range(s, K):
            block = (later + K - 1) % K if COMPACT else later
            p, dscore, query, grad = _weights(
                q, out, dout, lses + later * lse_stride, key, value, block * R + row, t, L, n, d, head, scale, h, at,
                GROUP,
            )  # fmt: skip
            dkey += tl.sum(dscore[:, None] * query, 0)
            dvalue += tl.sum(p[:, None] * grad, 0)
        place = kv + (T + (s - 1) * R + row).to(tl.int64) * (2 * m * d) + head * d + at
        tl.store(place, dkey.to(kv.dtype.element_ty), mask=at < d)
        tl.store(place + m * d, dvalue.to(kv.dtype.element_ty), mask=at < d)


def merge_bwd(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, lses: Tensor, dq0: Tensor, dq: Tensor, plan: Plan, s: int,
    scale: float,
) -> None:  # fmt: skip
    n, d = q.shape[1:]
    m = kv.shape[2]
    active: Any = q if plan.active is None else plan.active
    _merge_bwd[(plan.R, m)](
        q, kv, out, dout, lses, dq0.contiguous(), dq, active, s, plan.T, plan.R, plan.K, lses.shape[3], n, m, d, scale,
        lses.stride(0), COMPACT=plan.compact, GROUP=n // m, HEADS=triton.next_power_of_2(n // m),
        WIDTH=triton.next_power_of_2(d), num_warps=1,
    )  # fmt: skip
