"""--deep: blocks of the weights themselves are read: untrained or zero norms, NaN, repeated head rows, a table of its
own that is not the target's. At most `PER_TENSOR` bytes of each tensor, in slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftsmith.check.headers import BITS, read_blocks
from draftsmith.check.look import Finding, Look, fail, finding, ok, skip, warn
from draftsmith.check.types import TensorHeader

if TYPE_CHECKING:
    import numpy as np

BLOCK, PER_TENSOR = 4 << 20, 32 << 20
READABLE = ("BF16", "F16", "F32", "F64")


def _norms(look: Look) -> list[TensorHeader]:
    return [
        t
        for n, t in look.drafter.tensors.items()
        if t.dtype in READABLE and len(t.shape) == 1 and n.endswith(".weight") and "norm" in n
    ]


@finding("form.deep_norms")
def deep_norms(look: Look) -> Finding:
    zeros, ones = [], []
    for t in _norms(look):
        low, high = _range(t)
        if low == high == 0:
            zeros.append(t.name)
        elif low == high == 1:
            ones.append(t.name)
    if zeros:
        return fail(f"{', '.join(zeros[:3])}: all zeros, so the drafter proposes the same token always",
                    "the norm was never loaded or saved: export again")  # fmt: skip
    if ones:
        return warn(f"{', '.join(ones[:3])}: all ones, as freshly made",
                    "a trained norm leaves 1: look whether the converter lost it")  # fmt: skip
    return ok(f"{len(_norms(look))} norms, none untouched")


def _range(t: TensorHeader) -> tuple[float, float]:
    low, high = float("inf"), float("-inf")
    for block in read_blocks(t, BLOCK, PER_TENSOR):
        if block.size:
            low, high = min(low, float(block.min())), max(high, float(block.max()))
    return low, high


@finding("form.deep_values")
def deep_values(look: Look) -> Finding:
    import numpy as np

    bad, empty, seen = [], [], 0
    for name, t in look.drafter.tensors.items():
        if t.dtype not in READABLE:
            continue
        any_value = False
        for block in read_blocks(t, BLOCK, PER_TENSOR):
            seen += block.nbytes
            if not np.isfinite(block).all():
                bad.append(name)
                break
            any_value = any_value or bool(block.any())
        else:
            if not any_value and t.end > t.start and len(t.shape) > 1:
                empty.append(name)
    if bad:
        return fail(f"{', '.join(bad[:4])}: NaN or infinite values", "take an earlier checkpoint; training diverged")
    if empty:
        return fail(f"{', '.join(empty[:4])}: all zeros", "the tensor was never written: export again")
    return ok(f"no NaN, no empty matrix in {seen:,} bytes")


@finding("form.deep_head")
def deep_head(look: Look) -> Finding:
    import numpy as np

    t = look.drafter.tensors.get("lm_head.weight")
    if t is None or t.dtype not in READABLE or len(t.shape) != 2 or 0 in t.shape:
        return skip("no plain lm_head")
    block = next(read_blocks(t, 8 << 20, 8 << 20))
    rows = block[: block.size // t.shape[1] * t.shape[1]].reshape(-1, t.shape[1])[:4096]
    different = len(np.unique(rows, axis=0)) if len(rows) else 0
    if len(rows) > 1 and different < 0.9 * len(rows):
        return fail(
            f"{len(rows) - different:,} of the first {len(rows):,} rows of lm_head repeat another",
            "the head was resized or padded, not trained: export again",
        )
    return ok(f"{different:,} different rows among the first {len(rows):,}")


COMPARED = 8 << 20
"""Bytes of each table that are compared."""


@finding("silence.embedding")
def embedding(look: Look) -> Finding:
    import numpy as np

    mine, theirs = look.drafter.tensors.get("embed_tokens.weight"), look.target.embedding
    if mine is None:
        return ok("none of its own")
    if theirs is None:
        return skip("the target's embedding is not here to compare with")
    if mine.shape != theirs.shape:
        return ok(f"its own, {list(mine.shape)}; the target's is {list(theirs.shape)}")
    if mine.dtype not in READABLE or theirs.dtype not in READABLE:
        return skip(f"{mine.dtype} against {theirs.dtype}: not compared")
    a, b = (_rows(x) for x in (mine, theirs))
    a, b = a[: len(b)], b[: len(a)]  # a wider type gives fewer rows of the same bytes
    if np.array_equal(a, b):
        return ok(f"equal to the target's in the first {len(a):,} rows: it could be left out")
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosine = float(np.median((a * b).sum(1)[norms > 0] / norms[norms > 0])) if (norms > 0).any() else 0.0
    if cosine < 0.3:
        return fail(
            f"embed_tokens is not the target's (median cosine {cosine:.2f}): the engine keeps it as the drafter's own",
            "an untrained table: leave it out, and the engine shares the target's",
        )
    return ok(f"its own, trained on (median cosine {cosine:.2f} with the target's)")


def _rows(t: TensorHeader) -> np.ndarray:
    """The first rows of a table, at most COMPARED bytes, as float32."""
    wide = t.shape[1]
    most = max(COMPARED // max(wide * BITS[t.dtype] // 8, 1), 1) * wide * BITS[t.dtype] // 8
    block = next(read_blocks(t, most, most)).astype("f4")
    return block[: block.size // wide * wide].reshape(-1, wide)
