"""The step-0 part of the unrolled attention: causal within documents, by the fastest library kernel there is.

All K steps ask the same keys, so this part is an ordinary causal attention per step. Its backward may be given the
*joined* output and log-sum-exp (with the rows' own keys of later steps, ops.merge): P = exp(S - lse) and
dS = P (dP - rowsum(dO ⊙ O)) hold entry by entry (FlashAttention-2 paper, section 3.1.2), so each part's gradient is
exact. This is how ring attention joins its blocks.

Kernels: cuDNN for documents of one length (on Hopper nearly twice the rate of the next), FlashAttention-2's
variable-length form for packed documents, on a CPU products of the rows that count (cpu_attention.py),
without compiled loops torch's flash kernel. Log-sum-exps are [B, n, L] with B*L = T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.train.fused.cpu_attention import RowsCausal

Spans = tuple[tuple[int, int], ...]
_aten = torch.ops.aten


@dataclass(frozen=True)
class Documents:
    """The documents of a batch as the kernels want them. Padding counts as a document of its own.

    spans: documents proper. even: number of documents if all are of one length, else 0. ends int32 [documents + 1] on
    the device, filled up with T (documents of no length) to few different sizes; longest: upper bound of a length.
    """

    spans: Spans
    even: int
    ends: Tensor
    longest: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """What a captured graph depends on."""
        return self.even, self.ends.numel(), self.longest


def documents(spans: Spans, tokens: int, device: torch.device | str) -> Documents:
    """Documents of a packed sequence of T tokens."""
    whole, at = [], 0
    for start, stop in (*spans, (tokens, tokens)):
        if start > at:
            whole.append((at, start))
        if stop > start:
            whole.append((start, stop))
        at = max(at, stop)
    lengths = {stop - start for start, stop in whole}
    ends = [0, *(stop for _, stop in whole)]
    ends += [tokens] * (-len(ends) % 16)
    return Documents(
        spans=spans,
        even=len(whole) if len(lengths) == 1 else 0,
        ends=torch.tensor(ends, dtype=torch.int32).to(device, non_blocking=True),
        longest=min(tokens, -(-max(lengths) // 256) * 256),
    )


def _cpu_heads(x: Tensor, n: int) -> Tensor:
    """[rows, m, d] → [1, n, rows, d], key heads repeated."""
    if x.shape[1] != n:
        x = x[:, :, None].expand(-1, -1, n // x.shape[1], -1).flatten(1, 2)
    return x.transpose(0, 1)[None]


def cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """torch's CPU flash kernel. q [e, n, d], k/v [l, m, d] → out [e, n, d], log-sum-exp [n, e]."""
    n = q.shape[1]
    parts = [_cpu_heads(x, n) for x in (q, k, v)]
    o, logsum = _aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, causal, scale=scale)
    return o[0].transpose(0, 1), logsum[0] if logsum.shape[1] == n else logsum[0].transpose(0, 1)


def cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward, given any joined out and lse [n, e]."""
    n, m = q.shape[1], k.shape[1]
    parts = [_cpu_heads(x, n).contiguous() for x in (dout, q, k, v, out)]
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *parts, lse[None].contiguous(), 0.0, causal, scale=scale
    )
    dq, dk, dv = (g[0].transpose(0, 1) for g in grads)
    if m != n:
        dk, dv = (g.unflatten(1, (m, -1)).sum(2) for g in (dk, dv))
    return dq, dk, dv


class CpuCausal:
    """Per document, torch's CPU flash kernel; rows of no document give zeros. q [T, n, d], k/v [T, m, d]."""

    B = 1

    def __init__(self, docs: Documents, n: int, m: int, scale: float) -> None:
        self.spans, self.scale = docs.spans, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.zeros(1, q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
        for start, stop in self.spans:
            rows = slice(start, stop)
            out[rows], lse[0, :, rows] = cpu_forward(q[rows], k[rows], v[rows], True, self.scale)
        return out, lse, None

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
        for start, stop in self.spans:
            rows = slice(start, stop)
            dq[rows], dk[rows], dv[rows] = cpu_backward(
                dout[rows], q[rows], k[rows], v[rows], out[rows], lse[0, :, rows], True, self.scale
            )
        return dq, dk, dv


class CudnnCausal:
    """cuDNN's fused attention: B documents of L tokens each."""

    def __init__(self, docs: Documents, n: int, m: int, scale: float) -> None:
        self.B, self.scale = docs.even, scale

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.B, -1)).transpose(1, 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        parts = [self._heads(x) for x in (q, k, v)]
        out, lse, cq, ck, mq, mk, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            *parts, None, True, 0.0, True, False, scale=self.scale
        )
        return out.transpose(1, 2).flatten(0, 1), lse.view(lse.shape[:3]), (cq, ck, mq, mk, seed, offset)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        cq, ck, mq, mk, seed, offset = state
        d, *qkv, o = (self._heads(x) for x in (dout, q, k, v, out))
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            d, *qkv, o, lse[..., None], seed, offset, None, cq, ck, mq, mk, 0.0, True, scale=self.scale
        )
        dq, dk, dv = (g.transpose(1, 2).flatten(0, 1) for g in grads)
        return dq, dk, dv


class FlashCausal:
    """FlashAttention-2, variable length: any packing of documents."""

    B = 1

    def __init__(self, docs: Documents, n: int, m: int, scale: float) -> None:
        self.ends, self.longest, self.scale = docs.ends, docs.longest, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        out, lse, state, offset, _ = _aten._flash_attention_forward(
            q, k, v, self.ends, self.ends, self.longest, self.longest, 0.0, True, False, scale=self.scale
        )
        return out, lse[None], (state, offset)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        longest = self.longest
        dq, dk, dv = _aten._flash_attention_backward(
            dout, q, k, v, out, lse[0], self.ends, self.ends, longest, longest, 0.0, True, *state, scale=self.scale
        )
        return dq, dk, dv


Causal = CpuCausal | RowsCausal | CudnnCausal | FlashCausal


def causal_part(docs: Documents, n: int, m: int, scale: float, kernel: str | None = None) -> Causal:
    """The kernel for these documents; `kernel` ("cudnn", "flash") overrides the choice on a GPU."""
    if docs.ends.device.type == "cpu":
        return CpuCausal(docs, n, m, scale)
    if docs.even and kernel != "flash":
        return CudnnCausal(docs, n, m, scale)
    return FlashCausal(docs, n, m, scale)
