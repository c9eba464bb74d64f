"""What one decoding step costs, fitted on a few measured points; so speed is known where nobody measured.

A step serves C requests at once. With k draft tokens the target reads n = C·(k + 1) tokens in it, and the drafter runs
k times. The seconds of a step are taken for

    floor · bend(n / knee)  +  per_request · C  +  per_draft_token · k·C  +  [k > 0] · (draft_fixed + k · draft_pass)

* floor: reading the target's weights once, its launches and the host's work. All of it is paid for one token as for
  many, until the step has so many tokens that computing takes longer than reading: that number is the knee, and
  bend(x) = (1 + x⁴)^¼ goes from 1 (bound by memory) to x (bound by computing) without a corner, since no product
  reaches both roofs at once.
* per_request: reading its KV cache, its own token's logits and sampling, and the front end's work for it.
* per_draft_token: the same for a drafted token (its KV cache is read already), and what it costs in the drafter, which
  reads two tokens for each that it drafts. It may well be more than per_request.
* draft_pass: one run of the drafter; draft_fixed: what speculation adds to a step however many tokens are drafted. The
  two are told apart only if points with different k are given; else all of it is put on the passes.

Acceptance enters in one place: a step yields `tokens_per_step` tokens for each request, so
tokens per second = C · tokens_per_step / step seconds, and the speed-up is tokens_per_step · step(C, 0) / step(C, k).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from draftsmith.errors import Exit, UserError

KNEES = (math.inf, *(float(v) for v in np.geomspace(4, 4096, 61)))
"""Where computing may overtake reading, in tokens of a step. Infinite: never among what is served."""
BEND = 4
SPARE = 2
"""The knee is looked for only where there are so many points more than other parameters."""
WORTH = 0.9
"""A finite knee must bring the mean square down to this share at least, or it fits noise."""


@dataclass(frozen=True)
class Point:
    """One measurement. concurrency: requests at once; draft_tokens: k, 0 = no drafter; step_seconds: of one step."""

    concurrency: int
    draft_tokens: int
    step_seconds: float

    @staticmethod
    def of_rate(concurrency: int, draft_tokens: int, tokens_per_second: float, tokens_per_step: float = 1.0) -> Point:
        """From a measured speed. tokens_per_step: tokens that a request gains in a step (1 without a drafter)."""
        return Point(concurrency, draft_tokens, concurrency * tokens_per_step / tokens_per_second)


@dataclass(frozen=True)
class CostModel:
    """The parameters, in seconds (knee: tokens), and `residual`: the largest relative error at the fitted points."""

    floor: float
    knee: float
    per_request: float
    per_draft_token: float
    draft_pass: float
    draft_fixed: float
    residual: float = 0.0
    points: int = 0

    def step_seconds(self, concurrency: float, draft_tokens: int) -> float:
        """Seconds of one step."""
        weights = [self.floor, self.per_request, self.per_draft_token, self.draft_pass, self.draft_fixed]
        return float(np.dot(_row(concurrency, draft_tokens, self.knee), weights))

    def tokens_per_second(self, concurrency: int, draft_tokens: int, tokens_per_step: float = 1.0) -> float:
        """All requests together."""
        return concurrency * tokens_per_step / self.step_seconds(concurrency, draft_tokens)

    def break_even(self, concurrency: int, draft_tokens: int) -> float:
        """Tokens per step at which the drafter is exactly as fast as none."""
        return self.step_seconds(concurrency, draft_tokens) / self.step_seconds(concurrency, 0)

    def speedup(self, concurrency: int, draft_tokens: int, tokens_per_step: float) -> float:
        """Over no drafter at the same concurrency."""
        return tokens_per_step / self.break_even(concurrency, draft_tokens)

    def parts(self, concurrency: int, draft_tokens: int) -> dict[str, float]:
        """Seconds of a step by what they are for: target (one token each), drafting (the drafter's runs), tokens (what the
        k·C more tokens cost in target and drafter)."""
        target = self.step_seconds(concurrency, 0)
        drafting = (self.draft_fixed + draft_tokens * self.draft_pass) if draft_tokens else 0.0
        tokens = self.step_seconds(concurrency, draft_tokens) - target - drafting
        return {"target": target, "drafting": drafting, "tokens": tokens}

    def best(self, concurrency: int, rates: Sequence[float], most: int | None = None) -> tuple[int, float]:
        """(k, predicted tokens per second) of the fastest number of draft tokens, 0 = no drafter.
        rates: acceptance per position (unconditional); most: largest k to consider, none = as many as rates."""
        top = most if most is not None else len(rates)
        speeds = {
            k: self.tokens_per_second(concurrency, k, tokens_per_step(rates, k) if k else 1.0) for k in range(top + 1)
        }
        k = max(speeds, key=lambda i: (speeds[i], -i))
        return k, speeds[k]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: an infinite knee is null."""
        found = asdict(self)
        found["knee"] = None if math.isinf(self.knee) else self.knee
        return found


def tokens_per_step(rates: Sequence[float], draft_tokens: int) -> float:
    """1 + the acceptance of the first `draft_tokens` positions. rates are unconditional; where fewer were measured, a
    further position is taken to be accepted, once all before it are, as often as the last one measured."""
    known = [float(r) for r in rates[:draft_tokens]]
    if known and len(known) < draft_tokens:
        before = known[-2] if len(known) > 1 else 1.0
        conditional = known[-1] / before if before > 0 else 0.0
        while len(known) < draft_tokens:
            known.append(known[-1] * conditional)
    return 1.0 + sum(known)


def _row(concurrency: float, draft_tokens: int, knee: float) -> list[float]:
    n = concurrency * (draft_tokens + 1)
    bend = 1.0 if math.isinf(knee) else (1 + (n / knee) ** BEND) ** (1 / BEND)
    return [bend, concurrency, draft_tokens * concurrency, draft_tokens, 1.0 if draft_tokens else 0.0]


def _non_negative(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """The x ≥ 0 that makes |a·x − b|² least, and that. There are five columns, so every set of them is tried: the
    least squares of a set without a negative entry are feasible, and the best set's are the optimum."""
    best, least = np.zeros(a.shape[1]), float(b @ b)
    for size in range(1, a.shape[1] + 1):
        for columns in combinations(range(a.shape[1]), size):
            part = a[:, columns]
            x, _, rank, _ = np.linalg.lstsq(part, b, rcond=None)
            if rank < size or (x < 0).any():
                continue
            error = float(np.square(part @ x - b).sum())
            # A further column must earn its place by more than rounding.
            if error < least * (1 - 1e-9) - 1e-18:
                best, least = np.zeros(a.shape[1]), error
                best[list(columns)] = x
    return best, least


def fit(points: Iterable[Point]) -> CostModel:
    """The parameters, none negative, that make the relative errors of `points` least (squares).

    UserError unless there are two concurrencies without a drafter and two with one: with fewer, what a step costs and
    what a request adds to it cannot be told apart. Without the drafter alone (k = 0 everywhere) nothing is said of it."""
    given = [p for p in points if p.step_seconds > 0 and math.isfinite(p.step_seconds)]
    plain = {p.concurrency for p in given if p.draft_tokens == 0}
    drafted = {p.concurrency for p in given if p.draft_tokens > 0}
    if len(plain) < 2 or len(drafted) < 2:
        raise UserError(
            f"{len(plain)} concurrencies without a drafter and {len(drafted)} with one are too few to fit a cost model",
            "what a step costs at all and what each request adds to it are told apart by two of each",
            "measure both at two concurrencies or more, e.g. --ways drafter,none --concurrency 8,1",
            Exit.UNKNOWN,
        )
    several = len({p.draft_tokens for p in given if p.draft_tokens > 0}) > 1
    used = [0, 1, 2, 3, 4] if several else [0, 1, 2, 3]
    seconds = np.asarray([p.step_seconds for p in given])
    found: tuple[float, float, np.ndarray] | None = None
    for knee in KNEES if len(given) >= len(used) + SPARE else KNEES[:1]:
        rows = np.asarray([_row(p.concurrency, p.draft_tokens, knee) for p in given])[:, used]
        # Relative errors: a step at 64 at once is no more important for being longer.
        weights, error = _non_negative(rows / seconds[:, None], np.ones(len(given)))
        if found is None or error < (found[1] * WORTH if math.isinf(found[0]) else found[1]):
            found = (knee, error, weights)
    assert found is not None
    values = dict(zip(used, (float(w) for w in found[2]), strict=True))
    model = CostModel(
        floor=values[0],
        knee=found[0],
        per_request=values[1],
        per_draft_token=values[2],
        draft_pass=values[3],
        draft_fixed=values.get(4, 0.0),
    )
    worst = max(abs(model.step_seconds(p.concurrency, p.draft_tokens) / p.step_seconds - 1) for p in given)
    return CostModel(**asdict(model) | {"residual": worst, "points": len(given)})
