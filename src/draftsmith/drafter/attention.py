"""Attention over unrolled draft steps, without a mask of T×(K·T).

At draft step s, row t sees the step-0 keys of its own document up to t, and its own row's keys of steps 1…s: what the
engine's key cache holds when it drafts from row t. That is an ordinary causal attention plus s diagonals; the two are
joined through their log-sum-exp, which is exact (Flash-Decoding's split-k identity). Cost is linear in the number of
steps; nothing of size T×T outlives a call.

Shapes: T rows, n query heads, m key heads (n a multiple of m), d width of q and k, e width of v.
`attend` is the form that training uses; `attend_plain` is the definition, with the weights written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Spans = Sequence[tuple[int, int]]
"""Documents of a packed sequence as [start, stop), in order, none overlapping; rows outside all of them give zeros."""


class FirstKeys(Protocol):
    """Attention to the step-0 keys alone; one object serves one forward and one backward."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, n, d], k [T, m, d], v [T, m, e] → output [T, n, e], log-sum-exp [T, n] (float32 or better)."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v, with the output and log-sum-exp *joined* with whatever other keys there are."""
        ...


class SharedSpans(Protocol):
    """In place of spans where the step-0 keys lie with several processes (train/context.py)."""

    def first_keys(self, n: int, m: int, width: int, scale: float) -> FirstKeys: ...


def attend_plain(q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], spans: Spans, scale: float) -> Tensor:
    """q [T, n, d], ks/vs: one [T, m, d] / [T, m, e] per step so far (first = step 0) → [T, n, e].

    Written out: softmax weights are made per document. Memory grows with the square of the longest document."""
    group = q.shape[1] // ks[0].shape[1]
    out = q.new_zeros(q.shape[0], q.shape[1], vs[0].shape[-1])
    for start, stop in spans:
        rows = slice(start, stop)
        query = q[rows].transpose(0, 1)
        keys = [k[rows].transpose(0, 1).repeat_interleave(group, 0) for k in ks]
        values = [v[rows].transpose(0, 1).repeat_interleave(group, 0) for v in vs]
        scores = query @ keys[0].transpose(1, 2) * scale
        length = stop - start
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        own = [(query * k).sum(-1, keepdim=True) * scale for k in keys[1:]]
        weights = torch.cat([scores, *own], dim=-1)
        weights = weights.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        mixed = weights[..., :length] @ values[0]
        for j, v in enumerate(values[1:]):
            mixed = mixed + weights[..., length + j : length + j + 1] * v
        out[rows] = mixed.transpose(0, 1)
    return out


def _heads_first(x: Tensor, group: int, width: int) -> Tensor:
    """[T, m, w] → [1, m*group, T, width]: the kernel's order, key heads repeated, narrow values padded with zeros."""
    if x.shape[-1] < width:
        x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    if group > 1:
        x = x[:, :, None].expand(-1, -1, group, -1).flatten(1, 2)
    return x.transpose(0, 1)[None]


def _fold(x: Tensor, group: int, width: int) -> Tensor:
    """Gradient of `_heads_first`: [1, m*group, T, ·] → [T, m, width]."""
    x = x[0].transpose(0, 1)[..., :width]
    return x.unflatten(1, (-1, group)).sum(2) if group > 1 else x


@dataclass(frozen=True)
class _FlashSpans:
    """torch's CPU flash kernel, document by document. Its backward is exact for the joined softmax too when it is
    handed the *joined* output and log-sum-exp, because P = exp(S - lse) and dS = P (dP - rowsum(dO·O)) hold entry by
    entry (FlashAttention-2 paper, section 3.1.2)."""

    spans: Spans
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        n, group, width, e = q.shape[1], q.shape[1] // k.shape[1], q.shape[2], v.shape[2]
        out = q.new_zeros(q.shape[0], n, e)
        # rows of no document keep +inf: every weight made from it is 0, forward and backward
        lse = q.new_full((q.shape[0], n), float("inf"), dtype=torch.promote_types(q.dtype, torch.float32))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        for start, stop in self.spans:
            part = [_heads_first(x[start:stop], g, width) for x, g in ((q, 1), (k, group), (v, group))]
            o, logsum = flash(*part, 0.0, True, scale=self.scale)
            out[start:stop] = o[0].transpose(0, 1)[..., :e]
            lse[start:stop] = logsum[0].transpose(0, 1) if logsum.shape[1] == n else logsum[0]
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        group, width, e = q.shape[1] // k.shape[1], q.shape[2], v.shape[2]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        for start, stop in self.spans:
            rows = slice(start, stop)
            args = [
                _heads_first(x[rows], g, width).contiguous()
                for x, g in ((grad, 1), (q, 1), (k, group), (v, group), (out, 1))
            ]
            a, b, c = flash(*args, lse[rows].transpose(0, 1)[None].contiguous(), 0.0, True, scale=self.scale)
            dq[rows], dk[rows], dv[rows] = _fold(a, 1, width), _fold(b, group, width), _fold(c, group, e)
        return dq, dk, dv


class _Unrolled(torch.autograd.Function):
    """Attention to the step-0 keys by whatever `first` is, joined with the rows' own keys of later steps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, scale: float, first: FirstKeys, steps: int, *kv: Tensor) -> Tensor:
        ks, vs = kv[:steps], kv[steps:]
        group = q.shape[1] // ks[0].shape[1]
        out, lse = first.forward(q, ks[0], vs[0])
        if steps > 1:
            grouped = q.unflatten(1, (-1, group))
            own = torch.stack([(grouped * k[:, :, None]).sum(-1).flatten(1) for k in ks[1:]]) * scale  # [s, T, n]
            joined = torch.logsumexp(torch.cat([lse[None], own]), dim=0)
            weights = (own - joined).exp()
            out.mul_((lse - joined).exp().nan_to_num(0.0)[..., None].to(out.dtype))
            mixed = out.unflatten(1, (-1, group))
            for w, v in zip(weights, vs[1:], strict=True):
                mixed += w.unflatten(1, (-1, group))[..., None].to(v.dtype) * v[:, :, None]
            lse = joined
        ctx.save_for_backward(q, out, lse, *kv)
        ctx.rest = (scale, first, steps)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        q, out, lse, *kv = ctx.saved_tensors
        scale, first, steps = ctx.rest
        ks, vs = kv[:steps], kv[steps:]
        group = q.shape[1] // ks[0].shape[1]
        dq, dk, dv = first.backward(grad, q, ks[0], vs[0], out, lse)
        dks, dvs = [dk, *(torch.zeros_like(k) for k in ks[1:])], [dv, *(torch.zeros_like(v) for v in vs[1:])]
        if steps > 1:
            shared = (grad * out).sum(-1)  # [T, n]
            grad_g, q_g, dq_g = (
                grad.unflatten(1, (-1, group)),
                q.unflatten(1, (-1, group)),
                dq.unflatten(1, (-1, group)),
            )
            for j in range(1, steps):
                weight = ((q_g * ks[j][:, :, None]).sum(-1).flatten(1) * scale - lse).exp().to(q.dtype)
                d_weight = (grad_g * vs[j][:, :, None]).sum(-1).flatten(1)
                d_score = (weight * (d_weight - shared) * scale).unflatten(1, (-1, group))[..., None]
                dq_g += d_score * ks[j][:, :, None]
                dks[j] = (d_score * q_g).sum(2)
                dvs[j] = (weight.unflatten(1, (-1, group))[..., None] * grad_g).sum(2)
        return (dq, None, None, None, *dks, *dvs)


def attend(q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], spans: Spans | SharedSpans, scale: float) -> Tensor:
    """As `attend_plain`, in memory linear in T: the kernel on the CPU, flex attention on a GPU; with SharedSpans, what
    several processes hold together."""
    if not isinstance(spans, Sequence):
        first = spans.first_keys(q.shape[1], ks[0].shape[1], q.shape[2], scale)
        return _Unrolled.apply(q, scale, first, len(ks), *ks, *vs)
    if q.device.type == "cpu":
        return _Unrolled.apply(q, scale, _FlashSpans(tuple(spans), scale), len(ks), *ks, *vs)
    return _attend_flex(q, ks, vs, spans, scale)


def _attend_flex(q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], spans: Spans, scale: float) -> Tensor:
    """GPU form: flex attention gives the causal part with a differentiable log-sum-exp; autograd does the rest."""
    from draftsmith.drafter.flex import causal_documents

    group = q.shape[1] // ks[0].shape[1]
    out, lse = causal_documents(q, ks[0], vs[0], spans, scale)  # [T, n, e], [T, n]
    if len(ks) == 1:
        return out
    grouped = q.unflatten(1, (-1, group))
    own = torch.stack([(grouped * k[:, :, None]).sum(-1).flatten(1).float() for k in ks[1:]]) * scale
    weights = torch.cat([lse[None], own]).softmax(0).to(q.dtype)[..., None]
    mixed = weights[0] * out
    for w, v in zip(weights[1:], vs[1:], strict=True):
        mixed = mixed + w * v.repeat_interleave(group, 1)
    return mixed
