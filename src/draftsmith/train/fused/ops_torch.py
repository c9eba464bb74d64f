"""The step's elementwise parts in plain torch: the form for a CPU, and what the Triton kernels are tested against.

Every function writes into buffers it is given. Arithmetic is float32 (float64 for float64 inputs) whatever the
buffers hold. Triton twins with the same names and arguments: ops_triton.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.train.fused.plan import Plan

ROWS = 64
"""Rows of logits that soft_ce works on at a time: its passes then meet them in the cache (on two AVX2 cores 2.5 times
faster than over a whole chunk)."""


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm_fwd(x: Tensor, w: Tensor | None, eps: float, out: Tensor, index: Tensor | None = None) -> None:
    """out[i] = x[index[i]] / rms * w; w None: the bare normed row. x [*, H], out [R, H]."""
    rows = _wide(x if index is None else x[index])
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    torch.mul(rows * scale, 1.0 if w is None else _wide(w), out=out) if out.dtype == rows.dtype else out.copy_(
        rows * scale if w is None else rows * scale * _wide(w)
    )


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
    """Backward of norm_fwd: out[j] = (keep: out[j] +) (add[i] +) d/dx, with j = index[i]; dw [H] (float32 or better)
    is added to. y_out gets the forward's result once more (it may be x)."""
    rows = _wide(x if index is None else x[index])
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    hat = rows * scale
    wide = _wide(dy)
    dw += (wide * hat).sum(0)
    inner = wide * _wide(w)
    dx = (inner - hat * (inner * hat).mean(-1, keepdim=True)).mul_(scale)
    if add is not None:
        dx += add
    if y_out is not None:
        y_out.copy_(hat * _wide(w))
    if index is None:
        out.copy_(dx + out if keep else dx)
    elif keep:
        out.index_add_(0, index, dx.to(out.dtype))
    else:
        out.index_copy_(0, index, dx.to(out.dtype))


def silu_mul_fwd(gate_up: Tensor, out: Tensor) -> None:
    """gate_up [R, 2F] → out [R, F] = silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = _wide(gate)
    torch.mul(torch.nn.functional.silu(wide), up, out=out) if wide.dtype == out.dtype else out.copy_(
        torch.nn.functional.silu(wide) * up
    )


def silu_mul_bwd(gate_up: Tensor, dact: Tensor) -> None:
    """gate_up is replaced by its gradient."""
    gate, up = gate_up.chunk(2, dim=-1)
    g, d = _wide(gate), _wide(dact)
    sig = torch.sigmoid(g)
    silu = g * sig
    d_gate = d * up * (sig + silu * (1 - sig))
    up.copy_(d * silu)
    gate.copy_(d_gate)


def rope(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, step: int, back: bool = False) -> None:
    """Rotate x [R, heads, d] in place at position + step (tables [P, dim/2]; pairs (i, i + dim/2)); back: transposed."""
    half = cos.shape[1]
    at = position + step
    c, s = cos[at][:, None], sin[at][:, None]
    if back:
        s = -s
    a, b = x[..., :half], x[..., half : 2 * half]
    wa, wb = _wide(a), _wide(b)
    turned = wa * c - wb * s
    b.copy_(wb * c + wa * s)
    a.copy_(turned)


def _lse_rows(lse: Tensor, rows: Tensor | None) -> Tensor:
    """lse [B, n, L] → [T, n] (or the given rows of it)."""
    flat = lse.transpose(1, 2).reshape(-1, lse.shape[1])
    return flat if rows is None else flat[rows]


def merge(q: Tensor, kv: Tensor, out0: Tensor, lse: Tensor, out: Tensor, plan: Plan, s: int, scale: float) -> None:
    """Join the step-0 attention with the rows' own keys of steps 1…s.

    q [R, n, d] of step s; kv [kv_rows, 2, m, d]; out0 [T, n, d] (or of active rows) and lse [B, n, L] of the step-0
    part: lse becomes the joined one for active rows; out [R, n, d]."""
    R, n, d = q.shape
    m = kv.shape[2]
    grouped = _wide(q).view(R, m, n // m, d)
    base = out0 if len(out0) == R or plan.active is None else out0[plan.active]
    own_keys = [kv[plan.kv_block(j)] for j in range(1, s + 1)]
    parts = [_lse_rows(lse, plan.active)]
    parts += [(grouped * k[:, 0, :, None]).sum(-1).view(R, n) * scale for k in own_keys]
    joined = torch.logsumexp(torch.stack(parts), dim=0)
    mixed = _wide(base).view(R, m, n // m, d) * (parts[0] - joined).exp().view(R, m, n // m, 1)
    for part, k in zip(parts[1:], own_keys, strict=True):
        mixed += (part - joined).exp().view(R, m, n // m, 1) * k[:, 1, :, None]
    out.copy_(mixed.view(R, n, d))
    B, _, L = lse.shape
    if plan.active is None:
        lse.copy_(joined.view(B, L, n).transpose(1, 2))
    else:
        lse[plan.active // L, :, plan.active % L] = joined.to(lse.dtype)


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
    """Backward of `merge` for the own keys, once dout of steps s…K-1 is known: dq of step s (dq0 [T, n, d] from the
    step-0 part, plus own keys) and the gradients of the keys and values of step s >= 1, which replace them in kv.

    q, out, dout [K*R, n, d] in block order; lses [K, B, n, L]: joined."""  # fmt: skip
    n, d = q.shape[1:]
    R, m = plan.R, kv.shape[2]
    group = n // m

    def split(x: Tensor, step: int) -> Tensor:
        return _wide(x[plan.block(step)]).view(R, m, group, d)

    def weights(step: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """p and dscore of one own key under the queries of one step, those queries and their dout."""
        qs, dos = split(q, step), split(dout, step)
        p = ((qs * k).sum(-1) * scale - _lse_rows(lses[step], plan.active).view(R, m, group)).exp()
        shared = (dos * split(out, step)).sum(-1)
        return p[..., None], (p * ((dos * v).sum(-1) - shared) * scale)[..., None], qs, dos

    total = _wide(dq0 if len(dq0) == plan.R or plan.active is None else dq0[plan.active]).view(R, m, group, d).clone()
    for j in range(1, s + 1):
        k, v = (_wide(kv[plan.kv_block(j)][:, i])[:, :, None] for i in (0, 1))
        total += weights(s, k, v)[1] * k
    dq[plan.block(s)] = total.view(R, n, d).to(dq.dtype)
    if s == 0:
        return
    own = kv[plan.kv_block(s)]
    k, v = (_wide(own[:, i])[:, :, None] for i in (0, 1))
    dk, dv = torch.zeros_like(k[:, :, 0]), torch.zeros_like(v[:, :, 0])
    for later in range(s, plan.K):
        p, dscore, qs, dos = weights(later, k, v)
        dk += (dscore * qs).sum(2)
        dv += (p * dos).sum(2)
    own[:, 0], own[:, 1] = dk.to(kv.dtype), dv.to(kv.dtype)


def add_kv(dk: Tensor, dv: Tensor, into: Tensor, keep: bool) -> None:
    """into [T, 2*m*d] (float32 or better) = (keep: itself +) [dk | dv], each [T, m, d]."""
    half = into.shape[1] // 2
    for part, grad in ((into[:, :half], dk), (into[:, half:], dv)):
        (part.add_ if keep else part.copy_)(grad.reshape(part.shape))


def shift_sum(dq: Tensor, dkv: Tensor, out: Tensor, plan: Plan) -> None:
    """Gradient of the embedding's half of q/k/v: out[j] = Σ_s d(q|k|v)_s[j - s]. dq [K*R, Nq], dkv [kv_rows, Nkv],
    out [T + K - 1, Nq + Nkv]."""
    Nq = dq.shape[1]
    total = torch.zeros(out.shape, dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
    for s in range(plan.K):
        if plan.active is None:
            total[s : s + plan.T, :Nq] += dq[plan.block(s)]
        else:
            total[:, :Nq].index_add_(0, plan.active + s, dq[plan.block(s)].to(total.dtype))
        if s == 0 or plan.active is None:
            total[s : s + plan.T, Nq:] += dkv[plan.kv_block(s)]
        else:
            total[:, Nq:].index_add_(0, plan.active + s, dkv[plan.kv_block(s)].to(total.dtype))
    out.copy_(total)


def settle(teacher: Tensor) -> Tensor | None:
    """Teacher logits [M, D] become probabilities in place, once for all steps that use a row; returns their entropies
    [M]. Where the buffer is too narrow for that, nothing is done and None returned: soft_ce then does it."""
    if teacher.dtype not in (torch.float32, torch.float64):
        return None
    entropy = teacher.new_empty(len(teacher))
    for part, into in zip(teacher.split(ROWS), entropy.split(ROWS), strict=True):
        log_p = torch.log_softmax(part, -1)
        torch.exp(log_p, out=part)
        into.copy_(log_p.mul_(part).sum(-1).neg_())
    return entropy


def soft_ce(
    logits: Tensor,
    teacher: Tensor,
    slot: Tensor,
    goal: Tensor,
    weight: Tensor,
    figures: Tensor,
    at: Tensor,
    entropy: Tensor | None = None,
) -> None:
    """Cross-entropy of softmax(logits) under softmax(teacher[slot]); logits [c, D] becomes its gradient times weight.

    weight [c]: 0 = the row does not count. figures [3, K*R] gets cross-entropy, teacher entropy and "first choice is
    goal" of each counting row at `at` [c]. entropy [M]: what `settle` returned, if teacher holds probabilities."""
    for i in range(0, len(slot), ROWS):
        part = slice(i, i + ROWS)
        kept, where, live = logits[part], at[part], weight[part] != 0
        p = teacher.index_select(0, slot[part])
        if entropy is None:
            t = torch.log_softmax(_wide(p), -1)
            p = t.exp()
            disorder = -t.mul_(p).sum(-1)
        else:
            disorder = entropy[slot[part].long()]
        wide = _wide(kept)
        # in place where the buffer is wide enough: _wide gives the buffer itself then
        log_q = torch.log_softmax(wide, -1, out=wide) if wide is kept else wide.log_softmax(-1)
        ce = -torch.linalg.vecdot(p, log_q)
        choice = goal[part].long()
        # no argmax (torch's is slow on a CPU): the goal is the first choice if nothing is larger
        first = log_q.gather(1, choice.clamp_min(0)[:, None])[:, 0] >= log_q.amax(-1)
        for row, value in enumerate((ce * live, disorder * live, first & (choice >= 0) & live)):
            figures[row, where] = value.to(figures.dtype)
        grad = log_q.exp_().sub_(p).mul_(_wide(weight[part])[:, None])
        if grad is not kept:
            kept.copy_(grad)


def through_norm(w: Tensor, m: Tensor, gain: Tensor, dgain: Tensor) -> None:
    """For y = W (gain ⊙ x̂) and m = dYᵀ x̂: dgain = Σ_o W ⊙ m, and m becomes dW = m ⊙ gain. w, m [O, C]."""
    step = max(1, (1 << 22) // w.shape[1])
    total = torch.zeros(w.shape[1], dtype=torch.promote_types(w.dtype, torch.float32), device=w.device)
    for i in range(0, w.shape[0], step):
        total += (_wide(w[i : i + step]) * m[i : i + step]).sum(0)
    dgain.add_(total)
    m.mul_(gain)


def running_max(logits: Tensor, first: int, best: Tensor, arg: Tensor) -> None:
    """Largest logit so far: logits [M, c] are of tokens first…; best float32 [M] and arg int64 [M] are updated."""
    value, index = _wide(logits).max(-1)
    better = value > best
    best.copy_(torch.where(better, value.to(best.dtype), best))
    arg.copy_(torch.where(better, index + first, arg))
