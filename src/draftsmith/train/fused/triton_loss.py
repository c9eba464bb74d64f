"""Triton kernel of the soft cross-entropy: one program per row, two walks over it (the second finds it in the L2
cache). Twin: ops_torch.soft_ce, where arguments are described."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _online(top, mass, value):
    """Running maximum and sum of exp(value - maximum)."""
    higher = tl.maximum(top, tl.max(value, 0))
    # a teacher may hold -inf alone so far: exp(-inf - -inf) is not a number
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, mass * tl.exp(top - base) + tl.sum(tl.exp(value - base), 0)


@triton.jit
def _soft_ce(
    logits, teacher, slot, goal, weight, figures, at, D, cells, logits_stride, teacher_stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(at + row)
    factor = tl.load(weight + row).to(tl.float32)
    z_row = logits + row * logits_stride
    t_row = teacher + tl.load(slot + row).to(tl.int64) * teacher_stride
    if factor == 0.0:
        for i in range(0, D, BLOCK):
            c = i + tl.arange(0, BLOCK)
            tl.store(z_row + c, tl.zeros([BLOCK], logits.dtype.element_ty), mask=c < D)
        tl.store(figures + place, 0.0)
        tl.store(figures + cells + place, 0.0)
        tl.store(figures + 2 * cells + place, 0.0)
    else:
        z_top, t_top = float("-inf"), float("-inf")
        z_mass, t_mass = 0.0, 0.0
        choice = 0
        for i in range(0, D, BLOCK):
            c = i + tl.arange(0, BLOCK)
            z = tl.load(z_row + c, mask=c < D, other=float("-inf")).to(tl.float32)
            t = tl.load(t_row + c, mask=c < D, other=float("-inf")).to(tl.float32)
            block_top = tl.max(z, 0)
            block_choice = tl.min(tl.where(z == block_top, c, D), 0)
            choice = tl.where(block_top > z_top, block_choice, choice)
            z_top, z_mass = _online(z_top, z_mass, z)
            t_top, t_mass = _online(t_top, t_mass, t)
        z_log, t_log = z_top + tl.log(z_mass), t_top + tl.log(t_mass)
        ce, entropy = 0.0, 0.0
        for i in range(0, D, BLOCK):
            c = i + tl.arange(0, BLOCK)
            z = tl.load(z_row + c, mask=c < D, other=0.0).to(tl.float32) - z_log
            t = tl.load(t_row + c, mask=c < D, other=float("-inf")).to(tl.float32) - t_log
            p = tl.exp(t)
            ce -= tl.sum(tl.where(c < D, p * z, 0.0), 0)
            entropy -= tl.sum(tl.where(t > float("-inf"), p * t, 0.0), 0)
            tl.store(z_row + c, ((tl.exp(z) - p) * factor).to(logits.dtype.element_ty), mask=c < D)
        tl.store(figures + place, ce)
        tl.store(figures + cells + place, entropy)
        tl.store(figures + 2 * cells + place, (choice == tl.load(goal + row)).to(tl.float32))


def soft_ce(
    logits: Tensor, teacher: Tensor, slot: Tensor, goal: Tensor, weight: Tensor, figures: Tensor, at: Tensor
) -> None:
    rows, D = logits.shape
    block = min(4096, triton.next_power_of_2(D))
    _soft_ce[(rows,)](
        logits, teacher, slot, goal, weight, figures, at, D, figures.shape[1], logits.stride(0), teacher.stride(0),
        BLOCK=block, num_warps=8 if block >= 2048 else 2,
    )  # fmt: skip
