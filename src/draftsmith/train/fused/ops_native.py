"""The step's elementwise parts on a CPU as compiled loops (kernels.c): the functions of ops_torch.py, for float32 and
float64, rows dense. What is too small a part of the step to be worth a kernel is ops_torch's own."""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.train.fused.native import call
from draftsmith.train.fused.ops_torch import add_kv, running_max, through_norm
from draftsmith.train.fused.plan import Plan

__all__ = [
    "add_kv",
    "merge",
    "merge_bwd",
    "norm_bwd",
    "norm_fwd",
    "rope",
    "running_max",
    "settle",
    "shift_sum",
    "silu_mul_bwd",
    "silu_mul_fwd",
    "soft_ce",
    "through_norm",
]


def _check(*tensors: Tensor | None) -> None:
    """Addresses are all that the kernels see: one type, dense rows."""
    kinds = {t.dtype for t in tensors if t is not None}
    if len(kinds) != 1 or any(t.stride(-1) != 1 for t in tensors if t is not None):
        raise ValueError(f"kernels take dense rows of one type, not {kinds}")


def _places(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.int64).contiguous()


def norm_fwd(x: Tensor, w: Tensor | None, eps: float, out: Tensor, index: Tensor | None = None) -> None:
    _check(x, w, out)
    call("norm_fwd", x.dtype, len(out), x.shape[1], x, x.stride(0), w, float(eps), out, out.stride(0), _places(index))


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
    """`index` holds no row twice: rows are written by several threads."""
    _check(dy, x, w, out, dw, add, y_out)
    shares = dw.new_zeros(torch.get_num_threads(), dw.shape[0])
    call(
        "norm_bwd", x.dtype, len(dy), x.shape[1], dy, dy.stride(0), x, x.stride(0), w, float(eps), out, out.stride(0),
        shares, add, 0 if add is None else add.stride(0), int(keep), _places(index), y_out,
        0 if y_out is None else y_out.stride(0),
    )  # fmt: skip
    dw += shares.sum(0)


def silu_mul_fwd(gate_up: Tensor, out: Tensor) -> None:
    _check(gate_up, out)
    call("silu_mul_fwd", out.dtype, *out.shape, gate_up, gate_up.stride(0), out, out.stride(0))


def silu_mul_bwd(gate_up: Tensor, dact: Tensor) -> None:
    _check(gate_up, dact)
    call("silu_mul_bwd", dact.dtype, *dact.shape, gate_up, gate_up.stride(0), dact, dact.stride(0))


def rope(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, step: int, back: bool = False) -> None:
    _check(x, cos, sin)
    call(
        "rope", x.dtype, x.shape[0], x.shape[1], cos.shape[1], x, x.stride(0), x.stride(1), cos, sin, cos.stride(0),
        _places(position), step, -1.0 if back else 1.0,
    )  # fmt: skip


def merge(q: Tensor, kv: Tensor, out0: Tensor, lse: Tensor, out: Tensor, plan: Plan, s: int, scale: float) -> None:
    _check(*(dense(x) for x in (q, kv, out0, lse, out)))
    R, n, d = q.shape
    m = kv.shape[2]
    own = kv[plan.T :]
    call(
        "merge", q.dtype, R, n, m, d, lse.shape[2], s, float(scale), q, own, kv.stride(0), kv.stride(1), out0, lse, out,
        plan.active, int(len(out0) != R),
    )  # fmt: skip


def merge_bwd(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    dout: Tensor,
    lses: Tensor,
    dq0: Tensor,
    dq: Tensor,
    plan: Plan,
    s: int,
    scale: float,
) -> None:
    _check(*(dense(x) for x in (q, kv, out, dout, lses, dq0, dq)))
    n, d = q.shape[1:]
    own = kv[plan.T :]
    call(
        "merge_bwd", q.dtype, plan.R, n, kv.shape[2], d, lses.shape[3], plan.K, s, turn(plan), lses[0].numel(),
        float(scale), q, own, kv.stride(0), kv.stride(1), out, dout, lses, dq0, dq, plan.active,
        int(len(dq0) != plan.R),
    )  # fmt: skip


def shift_sum(dq: Tensor, dkv: Tensor, out: Tensor, plan: Plan) -> None:
    _check(dq, dkv, out)
    call(
        "shift_sum", out.dtype, plan.T, plan.R, plan.K, dq.shape[1], dkv.shape[1], turn(plan), dq, dq.stride(0), dkv,
        dkv.stride(0), out, out.stride(0), plan.inverse,
    )  # fmt: skip


def settle(teacher: Tensor) -> Tensor:
    _check(dense(teacher))
    entropy = teacher.new_empty(len(teacher))
    call("settle", teacher.dtype, *teacher.shape, teacher, entropy)
    return entropy


def soft_ce(
    logits: Tensor,
    teacher: Tensor,
    slot: Tensor,
    goal: Tensor,
    weight: Tensor,
    figures: Tensor,
    at: Tensor,
    entropy: Tensor,
) -> None:
    weight = weight.to(logits.dtype)
    _check(logits, dense(teacher), entropy, weight, dense(figures))
    call(
        "soft_ce", logits.dtype, *logits.shape, figures.shape[1], logits, logits.stride(0), teacher, entropy,
        slot.int(), _places(goal), weight, figures, _places(at),
    )  # fmt: skip


def dense(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise ValueError(f"a kernel takes this tensor without gaps, not with strides {x.stride()}")
    return x


def turn(plan: Plan) -> int:
    """Step s lies in block (s + turn) % K of per-row buffers (Plan.block)."""
    return plan.K - 1 if plan.compact else 0
