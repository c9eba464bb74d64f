"""The hand-written backward of step.FusedStep: steps from the last to the first, then one product per weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.train.batch import StepBatch
from draftsmith.train.fused.context import ContextCausal
from draftsmith.train.fused.plan import Plan

if TYPE_CHECKING:
    from draftsmith.train.fused.step import FusedStep, Kept


def weight_grad(out: Tensor, dy: Tensor, x: Tensor, accumulate: bool) -> None:
    """out (+)= dyᵀ x: the gradient of W in y = x Wᵀ."""
    if accumulate:
        out.addmm_(dy.t(), x)
    else:
        torch.mm(dy.t(), x, out=out)


def backward(
    step: FusedStep,
    batch: StepBatch,
    plan: Plan,
    kept: Kept,
    dy: Tensor,
    norm_grads: dict[str, Tensor],
    accumulate: bool,
) -> None:
    """dy [K*R, H]: gradient of every step's output stream from its own loss (of its normed form with norm_output);
    on return every gradient is in step.flat.grad. The buffers of `kept` are overwritten by gradients on the way."""
    take, ops, arena = step.arena.take, step.ops, step.arena
    T, R, K, H, Nq, half = plan.T, plan.R, plan.K, step.H, step.Nq, step.Nkv // 2
    flat, w, norms = step.flat, step.flat.w, step.config.norms
    kind = {"dtype": step.dtype}
    named = flat.named
    hidden_norm, post_norm = named["layers.0.hidden_norm.weight"], named["layers.0.post_attention_layernorm.weight"]
    heads = (-1, step.n, step.d)
    dh1, dq, dh0 = take(K * R, H, **kind), take(K * R, Nq, **kind), take(T, H, **kind)
    own = kept.kv.view(-1, 2, step.m, step.d)
    after = arena.mark()  # what follows makes room for the weight products
    dmixed, first_kv = take(K * R, Nq, **kind), take(T, step.Nkv, dtype=step.wide)
    wq, wkv = w["qkv"][:Nq, H:], w["qkv"][Nq:, H:]

    for s in reversed(range(K)):
        b, kvb = plan.block(s), plan.kv_block(s)
        mark = arena.mark()
        if norms.norm_output:
            ops.norm_bwd(dy[b], kept.y[b], named["norm.weight"], step.eps, dy[b], norm_grads["norm"])
        dact = torch.mm(dy[b], w["down"], out=take(R, step.F, **kind))
        ops.silu_mul_bwd(kept.gate_up[b], dact)
        arena.release(mark)
        dx = torch.mm(kept.gate_up[b], w["gate_up"], out=take(R, H, **kind))
        ops.norm_bwd(
            dx, kept.h1[b], post_norm, step.eps, dh1[b], norm_grads["post_attention_layernorm"], add=dy[b],
            y_out=kept.h1[b],
        )  # fmt: skip
        torch.mm(dh1[b], w["o"], out=dmixed[b])
        inner = arena.mark()
        grads = kept.causal.backward(
            step.query_heads(dmixed[b], plan, kept.causal),
            step.query_heads(kept.q[b], plan, kept.causal),
            *step.keys_values(kept.kv, plan),
            step.query_heads(kept.mixed[b], plan, kept.causal),
            kept.lses[s],
            kept.states[s],
        )
        kept.states[s] = None
        ops.add_kv(grads[1], grads[2], first_kv, keep=s + 1 < K)
        if s == 0 and isinstance(kept.causal, ContextCausal):
            kept.causal.settle(first_kv)
        ops.merge_bwd(
            kept.q.view(heads), own, kept.mixed.view(heads), dmixed.view(heads), kept.lses, grads[0], dq.view(heads),
            plan, s, step.scale,
        )  # fmt: skip
        del grads
        arena.release(inner)
        step.rotate(dq[b], kept.position, s, back=True)
        if s == 0:
            kept.kv[:T].copy_(first_kv)
        step.rotate(kept.kv[kvb, :half], batch.position if s == 0 else kept.position, s, back=True)
        if s:
            torch.mm(dq[b], wq, out=dx)
            dx.addmm_(kept.kv[kvb], wkv)
            if norms.norm_before_residual:
                dx += dh1[b]
            before = plan.block(s - 1)
            ops.norm_bwd(
                dx, kept.fed[before], hidden_norm, step.eps, dy[before], norm_grads["hidden_norm"],
                add=None if norms.norm_before_residual else dh1[b], keep=True,
            )  # fmt: skip
        else:
            _first_step(step, plan, kept, dq[b], dh1[b], dh0, norm_grads["hidden_norm"])
        arena.release(mark)
    arena.release(after)
    _weights(step, batch, plan, kept, dy, dh1, dq, dh0, norm_grads, accumulate)


def _first_step(
    step: FusedStep, plan: Plan, kept: Kept, dq: Tensor, dh1: Tensor, dh0: Tensor, norm_grad: Tensor
) -> None:
    """Gradient of the fused aux states [T, H]: every row through keys and values, active rows through the rest."""
    H, Nq, w = step.H, step.Nq, step.flat.w["qkv"]
    before = step.config.norms.norm_before_residual
    dx = torch.mm(kept.kv[: plan.T], w[Nq:, H:], out=step.arena.take(plan.T, H, dtype=step.dtype))
    if plan.active is None:
        dx.addmm_(dq, w[:Nq, H:])
        if before:
            dx += dh1
    else:
        rows = torch.mm(dq, w[:Nq, H:], out=step.arena.take(plan.R, H, dtype=step.dtype))
        dx.index_add_(0, plan.active, rows + dh1 if before else rows)
    add = dh1 if plan.active is None and not before else None
    hidden_norm = step.flat.named["layers.0.hidden_norm.weight"]
    step.ops.norm_bwd(dx, kept.h0, hidden_norm, step.eps, dh0, norm_grad, add=add)
    if plan.active is not None and not before:
        dh0.index_add_(0, plan.active, dh1)


def _weights(
    step: FusedStep,
    batch: StepBatch,
    plan: Plan,
    kept: Kept,
    dy: Tensor,
    dh1: Tensor,
    dq: Tensor,
    dh0: Tensor,
    norm_grads: dict[str, Tensor],
    accumulate: bool,
) -> None:
    """One product per weight over the rows of all steps."""
    flat, Nq, H, arena, ops = step.flat, step.Nq, step.H, step.arena, step.ops
    g, w, norms = flat.g, flat.w, step.config.norms
    weight_grad(g["down"], dy, kept.act, accumulate)
    weight_grad(g["gate_up"], kept.gate_up, kept.h1, accumulate)
    weight_grad(g["o"], dh1, kept.mixed, accumulate)
    weight_grad(g["qkv"][:Nq, H:], dq, step.query_rows(kept.x, plan)[: plan.K * plan.R], accumulate)
    weight_grad(g["qkv"][Nq:, H:], kept.kv, kept.x[: plan.kv_rows], accumulate)
    if "o_bias" in g:
        norm_grads["o_bias"] += dh1.sum(0, dtype=step.wide)

    mark = arena.mark()
    dprojected = arena.take(len(kept.ids), Nq + step.Nkv, dtype=step.dtype)
    ops.shift_sum(dq, kept.kv, dprojected, plan)
    if "qkv_bias" in g:
        norm_grads["qkv_bias"] += dprojected.sum(0, dtype=step.wide)
    unit = arena.take(len(kept.ids), H, dtype=step.dtype)
    assert step.embedding is not None
    ops.norm_fwd(step.embedding, None, step.eps, unit, kept.ids)
    gain = flat.named["layers.0.input_layernorm.weight"]
    _through(step, "qkv", slice(0, H), dprojected, unit, gain, norm_grads["input_layernorm"], accumulate)
    if flat.train_embedding:
        dnormed = torch.mm(dprojected, w["qkv"][:, :H], out=unit)
        rows = step.embedding[kept.ids]
        ops.norm_bwd(dnormed, rows, gain, step.eps, rows, torch.zeros_like(norm_grads["norm"]), y_out=None)
        if not accumulate:
            g["embedding"].zero_()
        g["embedding"].index_add_(0, kept.ids, rows)
    arena.release(mark)

    if not (norms.norm_before_fc or norms.fc_norm):
        weight_grad(g["fc"], dh0, batch.aux, accumulate)
    else:
        bare = arena.take(*batch.aux.shape, dtype=step.dtype)
        step.fuse_inputs(batch.aux, bare, unit=True)
        last = "fc_norm" if norms.fc_norm else "input_norm"
        _through(step, "fc", slice(None), dh0, bare, flat.w[last].flatten(), norm_grads[last].view(-1), accumulate)
        if norms.fc_norm and norms.norm_before_fc:
            _first_of_two_norms(step, batch, dh0, bare, norm_grads["input_norm"])
    arena.release(mark)
    for name, grad in norm_grads.items():
        g[name].copy_(grad + g[name] if accumulate else grad)


def _through(
    step: FusedStep,
    group: str,
    columns: slice,
    dy: Tensor,
    unit: Tensor,
    gain: Tensor,
    dgain: Tensor,
    accumulate: bool,
) -> None:
    """Gradients of a weight and of the norm gain in front of it, from one product with the bare normed rows."""
    weight, grad = step.flat.w[group][:, columns], step.flat.g[group][:, columns]
    into = step.arena.take(*grad.shape, dtype=step.dtype) if accumulate else grad
    weight_grad(into, dy, unit, False)
    step.ops.through_norm(weight, into, gain, dgain)
    if accumulate:
        grad += into


def _first_of_two_norms(step: FusedStep, batch: StepBatch, dh0: Tensor, scratch: Tensor, dgain: Tensor) -> None:
    """input_norm and fc_norm both: the first one's gain needs the gradient through fc and the second."""
    c, named = step.config, step.flat.named
    G = c.target_hidden_size
    first = step.arena.take(*batch.aux.shape, dtype=step.dtype)
    step.ops.norm_fwd(batch.aux, named["input_norm.weight"], step.eps, first)
    torch.mm(dh0, step.flat.w["fc"], out=scratch)
    unused = torch.zeros(G, dtype=step.wide, device=step.device)
    for a in range(c.num_aux_layers):
        part = slice(a * G, (a + 1) * G)
        gain = named[f"fc_norm.{a}.weight"]
        step.ops.norm_bwd(scratch[:, part], first[:, part], gain, step.eps, scratch[:, part], unused)
    step.ops.norm_bwd(scratch, batch.aux, named["input_norm.weight"], step.eps, scratch, dgain)
