"""The causal, document-bound part of the unrolled attention by flex attention (GPU; compiled once per shape)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


_masks: dict[tuple[Any, ...], Any] = {}


def _block_mask(tokens: int, spans: Sequence[tuple[int, int]], device: torch.device) -> Any:
    """Block mask of causal attention within documents; the last few are kept, for the K steps of a batch."""
    from torch.nn.attention.flex_attention import create_block_mask

    key = (tokens, tuple(spans), device)
    if key not in _masks:
        doc = torch.full((tokens,), -1, dtype=torch.int32)
        for i, (start, stop) in enumerate(spans):
            doc[start:stop] = i
        doc = doc.to(device)

        def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (doc[q] == doc[k])

        while len(_masks) >= 4:
            _masks.pop(next(iter(_masks)))
        _masks[key] = create_block_mask(inside, None, None, tokens, tokens, device=device)
    return _masks[key]


def causal_documents(
    q: Tensor, k: Tensor, v: Tensor, spans: Sequence[tuple[int, int]], scale: float
) -> tuple[Tensor, Tensor]:
    """q [T, n, d], k [T, m, d], v [T, m, e] → output [T, n, e] and log-sum-exp [T, n], both differentiable."""
    mask = _block_mask(q.shape[0], spans, q.device)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out, lse = _compiled()(*heads, block_mask=mask, scale=scale, return_lse=True, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)
