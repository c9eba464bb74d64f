"""Bootstrap intervals: how much a figure would move with other prompts of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


def ratio_interval(top: Sequence[float], bottom: Sequence[float], seed: int = 0) -> list[float] | None:
    """95 % interval of sum(top)/sum(bottom), the pairs resampled together; None for fewer than five pairs."""
    a, b = np.asarray(top, float), np.asarray(bottom, float)
    if len(a) < 5 or b.sum() <= 0:
        return None
    picks = np.random.default_rng(seed).integers(0, len(a), (RESAMPLES, len(a)))
    below = b[picks].sum(1)
    values = a[picks].sum(1) / np.where(below > 0, below, np.nan)
    return _bounds(values)


def paired_ratio_interval(
    ours: tuple[Sequence[float], Sequence[float]], theirs: tuple[Sequence[float], Sequence[float]], seed: int = 0
) -> list[float] | None:
    """95 % interval of (Σours₀/Σours₁) / (Σtheirs₀/Σtheirs₁) over the same prompts: one resample picks the same
    prompts on both sides, so what makes a prompt easy for both cancels."""
    a, b, c, d = (np.asarray(v, float) for v in (*ours, *theirs))
    if len({len(a), len(b), len(c), len(d)}) != 1 or len(a) < 5:
        return None
    picks = np.random.default_rng(seed).integers(0, len(a), (RESAMPLES, len(a)))
    sums = [v[picks].sum(1) for v in (a, b, c, d)]
    with np.errstate(divide="ignore", invalid="ignore"):
        return _bounds((sums[0] / sums[1]) / (sums[2] / sums[3]))


def interval(items: Sequence[Any], figure: Callable[[list[Any]], float | None], seed: int = 0) -> list[float] | None:
    """95 % interval of any figure of a list, items resampled."""
    if len(items) < 5:
        return None
    rng = np.random.default_rng(seed)
    values = [figure([items[i] for i in rng.integers(0, len(items), len(items))]) for _ in range(400)]
    return _bounds(np.asarray([v for v in values if v is not None], float))


def _bounds(values: np.ndarray) -> list[float] | None:
    kept = values[np.isfinite(values)]
    if not len(kept):
        return None
    edge = (1 - LEVEL) / 2
    return [round(float(v), 4) for v in np.quantile(kept, [edge, 1 - edge])]


def rate_interval(
    events: Sequence[tuple[float, int]], seconds: float, stretches: int = 20, seed: int = 0
) -> list[float] | None:
    """95 % interval of tokens per second, from `stretches` equal stretches of the run resampled.
    events: (seconds since the start, tokens)."""
    if seconds <= 0 or len(events) < stretches:
        return None
    counts = np.zeros(stretches)
    for at, tokens in events:
        counts[min(int(at / seconds * stretches), stretches - 1)] += tokens
    return ratio_interval(list(counts), [seconds / stretches] * stretches, seed)
