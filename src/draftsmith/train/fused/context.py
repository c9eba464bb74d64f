"""The step-0 part of the attention where several ranks share a sequence (train/context.py).

A chunk's rows see their own chunk's keys, causal within documents (the kernels of attention.py, as on one rank), and,
where a document began before the chunk, all of its earlier keys: one rectangle without a mask. Both are joined through
their log-sum-exp, and the backward of each is exact with the joined output, as attention.py says.

The keys of all ranks are gathered at the first draft step and serve all K. The gradient of the rectangles' keys is
added up over all steps in float32, and goes back to the ranks whose keys they are once (`settle`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.train.context import Layout
from draftsmith.train.fused.attention import Documents, causal_part, cpu_backward, cpu_forward, documents

_aten = torch.ops.aten
JOIN_ROWS = 4096
"""Rows that are joined at a time: bounds the float32 copies."""


@dataclass(frozen=True)
class Rectangle:
    """rows: of the chunk, from its first; start, stop: keys in the whole sequence; row_ends, key_ends int32 [2] on the
    device: what the variable-length kernel takes."""

    rows: int
    start: int
    stop: int
    row_ends: Tensor
    key_ends: Tensor

    @property
    def keys(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ContextPlan:
    """Per chunk of this rank: documents within it, and the rectangle of what came before (None = nothing)."""

    layout: Layout
    docs: tuple[Documents, Documents]
    earlier: tuple[Rectangle | None, Rectangle | None]


def plan_context(layout: Layout, device: torch.device | str) -> ContextPlan:
    docs: list[Documents] = []
    earlier: list[Rectangle | None] = []
    for at in layout.starts:
        docs.append(documents(layout.inside(at), layout.chunk, device))
        found = layout.before(at)
        if found is None:
            earlier.append(None)
        else:
            rows, start, stop = found
            ends = torch.tensor([[0, rows], [0, stop - start]], dtype=torch.int32).to(device)
            earlier.append(Rectangle(rows, start, stop, ends[0], ends[1]))
    return ContextPlan(layout, (docs[0], docs[1]), (earlier[0], earlier[1]))


class CpuFull:
    """Every row sees every key. q [e, n, d], k/v [l, m, d] → out [e, n, d], log-sum-exp [n, e]."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        return (*cpu_forward(q, k, v, False, self.scale), None)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return cpu_backward(dout, q, k, v, out, lse, False, self.scale)


class CudnnFull:
    """The same by cuDNN."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        parts = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out, lse, cq, ck, mq, mk, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            *parts, None, True, 0.0, False, False, scale=self.scale
        )
        return out[0].transpose(0, 1), lse.view(lse.shape[:3])[0], (cq, ck, mq, mk, seed, offset)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        cq, ck, mq, mk, seed, offset = state
        parts = [x.transpose(0, 1)[None] for x in (dout, q, k, v, out)]
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *parts, lse[None, ..., None].contiguous(), seed, offset, None, cq, ck, mq, mk, 0.0, False, scale=self.scale
        )
        dq, dk, dv = (g[0].transpose(0, 1) for g in grads)
        return dq, dk, dv


class FlashFull:
    """The same by FlashAttention-2."""

    def __init__(self, x: Rectangle, scale: float) -> None:
        self.fixed, self.scale = (x.row_ends, x.key_ends, x.rows, x.keys), scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        out, lse, state, offset, _ = _aten._flash_attention_forward(
            q, k, v, *self.fixed, 0.0, False, False, scale=self.scale
        )
        return out, lse, (state, offset)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _aten._flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), *self.fixed, 0.0, False, *state, scale=self.scale
        )
        return dq, dk, dv


def _full_part(x: Rectangle, even: bool, scale: float, kernel: str | None) -> CpuFull | CudnnFull | FlashFull:
    """cuDNN makes a plan per shape, so it takes the regular ones only."""
    if x.row_ends.device.type == "cpu":
        return CpuFull(scale)
    if even and kernel != "flash" and x.rows % 128 == 0 and x.keys % 128 == 0:
        return CudnnFull(scale)
    return FlashFull(x, scale)


def join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Attention over two sets of keys from that over each: out [e, n, d] and lse [n, e] become the joined ones."""
    wide = lse.dtype
    for i in range(0, out.shape[0], JOIN_ROWS):
        rows = slice(i, i + JOIN_ROWS)
        share = torch.sigmoid(other_lse[:, rows] - lse[:, rows]).t()[..., None]
        out[rows] = torch.lerp(out[rows].to(wide), other[rows].to(wide), share).to(out.dtype)
    lse.copy_(torch.logaddexp(lse, other_lse))


class ContextCausal:
    """As the classes of attention.py, over this rank's local rows (halos give zeros). One serves one optimizer step:
    forward K times, backward K times, `settle`. hold: keep the gathered keys between the two."""

    B = 1

    def __init__(
        self, plan: ContextPlan, n: int, m: int, scale: float, kernel: str | None = None, hold: bool = True
    ) -> None:
        self.plan, self.layout, self.hold = plan, plan.layout, hold
        self.local = [causal_part(docs, n, m, scale, kernel) for docs in plan.docs]
        self.full = [
            None if x is None else _full_part(x, bool(docs.even), scale, kernel)
            for x, docs in zip(plan.earlier, plan.docs, strict=True)
        ]
        self._whole: Tensor | None = None
        self._grad: Tensor | None = None

    def _keys_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks' keys and values [total, m, d] (nothing, where no document needs them)."""
        if not self.layout.crossing:
            return k[:0], v[:0]
        whole = self._whole
        if whole is None:
            whole = self.layout.gather(torch.stack([k, v], dim=1))
            self._whole = whole if self.hold else None
        return whole[:, 0], whole[:, 1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        """q [T, n, d], k/v [T, m, d] of the local rows → out [T, n, d], lse [1, n, T], state."""
        keys, values = self._keys_values(k, v)
        T, n, _ = q.shape
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.zeros(1, n, T, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        states = []
        for rows, local, x, full in zip(self.layout.rows, self.local, self.plan.earlier, self.full, strict=True):
            o, logsum, state = local.forward(q[rows], k[rows], v[rows])
            out[rows], here = o, lse[0, :, rows]
            here.copy_(logsum.transpose(0, 1).reshape(n, -1))
            other = None
            if x is not None and full is not None:
                o, logsum, other = full.forward(q[rows][: x.rows], keys[x.start : x.stop], values[x.start : x.stop])
                join(out[rows][: x.rows], here[:, : x.rows], o, logsum)
            states.append((state, other))
        return out, lse, states

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse: joined (also with the rows' own later keys). The gradients of k and v lack what `settle` adds."""
        keys, values = self._keys_values(k, v)
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        if self.layout.crossing and self._grad is None:
            wide = torch.promote_types(k.dtype, torch.float32)
            self._grad = torch.zeros(self.layout.total, 2, *k.shape[1:], dtype=wide, device=k.device)
        for i, rows in enumerate(self.layout.rows):
            local, x, full, (mine, other) = self.local[i], self.plan.earlier[i], self.full[i], state[i]
            logsum = lse[0, :, rows]
            parts = dout[rows], q[rows], k[rows], v[rows], out[rows]
            by_document = logsum.unflatten(1, (local.B, -1)).transpose(0, 1).contiguous()
            dq[rows], dk[rows], dv[rows] = local.backward(*parts, by_document, mine)
            if x is None or full is None or self._grad is None:
                continue
            e, span = x.rows, slice(x.start, x.stop)
            grads = full.backward(
                parts[0][:e], parts[1][:e], keys[span], values[span], parts[4][:e], logsum[:, :e], other
            )
            dq[rows][:e] += grads[0]
            self._grad[span, 0] += grads[1]
            self._grad[span, 1] += grads[2]
        return dq, dk, dv

    def settle(self, first: Tensor) -> None:
        """Add what the rows of all ranks' rectangles want of this rank's keys and values to `first` [T, 2*m*d]."""
        if self._grad is None:
            return
        parts = self.layout.scatter_sum(self._grad.flatten(1))
        for rows, part in zip(self.layout.rows, parts, strict=True):
            first[rows] += part
        self._grad = self._whole = None


@dataclass(frozen=True)
class ContextSpans:
    """The same for the objective in autograd (drafter/attention.py SharedSpans)."""

    layout: Layout
    device: torch.device

    def first_keys(self, n: int, m: int, width: int, scale: float) -> ContextFirstKeys:
        return ContextFirstKeys(plan_context(self.layout, self.device), n, m, width, scale)


class ContextFirstKeys:
    """One draft step's attention to the step-0 keys of all ranks. It gathers them again for the backward: held, they
    would be there once per draft step."""

    def __init__(self, plan: ContextPlan, n: int, m: int, width: int, scale: float) -> None:
        # cuDNN takes heads of up to 128
        self.causal = ContextCausal(plan, n, m, scale, "flash" if width > 128 else None, hold=False)
        self.width = width
        self.state: Any = None

    def _padded(self, x: Tensor) -> Tensor:
        """The kernels want values as wide as keys."""
        return torch.nn.functional.pad(x, (0, self.width - x.shape[-1])) if x.shape[-1] < self.width else x

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, self.state = self.causal.forward(q, k, self._padded(v))
        return out[..., : v.shape[-1]].contiguous(), lse[0].t()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = lse.t()[None].contiguous()
        dq, dk, dv = self.causal.backward(self._padded(grad), q, k, self._padded(v), self._padded(out), lse, self.state)
        both = torch.stack([dk, dv], dim=1).to(torch.promote_types(k.dtype, torch.float32))
        self.causal.settle(both.flatten(1))
        dk, dv = both.to(k.dtype).unbind(1)
        return dq, dk, dv[..., : v.shape[-1]]
