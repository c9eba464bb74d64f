"""Is greedy decoding the same with and without the drafter? Token ids compared, first differences judged by logits.

Two bf16 runs that batch differently round differently, and where the two best logits are a step apart the winner can
change: a *tie*, no fault of the drafter. A larger gap is a *difference*: then the verification itself is at fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from draftsmith.bench.load import Pass, Request
from draftsmith.engine.client import EngineClient
from draftsmith.target.tokenizer import common_length
from draftsmith.ui import Ui

TIE_STEPS = 2
"""A gap of so many bf16 steps is still a tie (architecture.md, "lossless")."""

ASSUMED_LOGIT = 16.0
"""Where a server gives log-probabilities instead of logits, the step is taken at this magnitude."""

TOP = 5


def bf16_step(value: float) -> float:
    """Distance to the next bf16 number (8 bits of significand)."""
    return float(2.0 ** (math.floor(math.log2(abs(value))) - 7)) if value else 2.0**-133


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first unequal token; None for equal lists. A list that ends earlier differs where it ends."""
    return None if a == b else common_length(a, b)


@dataclass(frozen=True)
class Difference:
    """A prompt whose answers differ. at: index in the answer. plain, ours: the two tokens there (None: it ended)."""

    prompt_id: str
    set: str
    at: int
    plain: int | None
    ours: int | None
    prefix: list[int]

    def judged(self, top: list[tuple[int, float]], logits: bool) -> dict[str, Any]:
        """With the plain server's best tokens at that place: gap in logits, in bf16 steps, and the verdict.

        A tie needs both tokens among those within two steps of the best."""
        best = top[0][1] if top else 0.0
        step = bf16_step(best if logits else ASSUMED_LOGIT)
        values = dict(top)
        gaps = [best - values[t] for t in (self.plain, self.ours) if t is not None and t in values]
        known = len(gaps) == 2
        gap = max(gaps) if known else None
        tie = gap is not None and gap <= TIE_STEPS * step
        return {
            "prompt_id": self.prompt_id,
            "set": self.set,
            "at": self.at,
            "tokens": [self.plain, self.ours],
            "top": [[t, round(v, 5)] for t, v in top[:2]],
            "gap": round(gap, 5) if gap is not None else None,
            "gap_steps": round(gap / step, 2) if gap is not None else None,
            "scale": "logits" if logits else f"log-probabilities, step taken at a logit of {ASSUMED_LOGIT:g}",
            "verdict": "tie" if tie else "difference",
        }


def differences(plain: Pass, ours: Pass) -> tuple[int, list[Difference]]:
    """(prompts compared, those that differ)."""
    theirs = {r.prompt_id: r for r in ours.requests}
    found, compared = [], 0
    for request in plain.requests:
        other = theirs.get(request.prompt_id)
        if other is None:
            continue
        compared += 1
        at = first_difference(request.token_ids, other.token_ids)
        if at is not None:
            found.append(_difference(request, other, at))
    return compared, found


def _difference(plain: Request, ours: Request, at: int) -> Difference:
    return Difference(
        plain.prompt_id,
        plain.set,
        at,
        plain.token_ids[at] if at < len(plain.token_ids) else None,
        ours.token_ids[at] if at < len(ours.token_ids) else None,
        [*plain.prompt_token_ids, *plain.token_ids[:at]],
    )


async def judge(client: EngineClient, found: list[Difference], logits: bool, ui: Ui) -> list[dict[str, Any]]:
    """Ask the plain server for its best tokens at each first difference. logits: it was started to give raw logits."""
    rows = []
    for d in found:
        answer = await client.complete(d.prefix, max_tokens=1, temperature=0, logprobs=TOP, ignore_eos=True)
        rows.append(d.judged(answer.top[0] if answer.top else [], logits))
        ui.note(f"  {d.set} {d.prompt_id} differs at token {d.at}: {rows[-1]['verdict']}, gap {rows[-1]['gap']}")
    return rows


def verdict(compared: int, rows: list[dict[str, Any]], with_ids: bool) -> dict[str, Any]:
    """{"lossless", "ties", "compared", "differences"}; lossless is None where nothing could be compared."""
    ties = sum(r["verdict"] == "tie" for r in rows)
    worse = [r for r in rows if r["verdict"] != "tie"]
    return {
        "lossless": (not worse) if compared and with_ids else None,
        "compared": compared,
        "equal": compared - len(rows),
        "ties": ties,
        "differences": rows,
    }
