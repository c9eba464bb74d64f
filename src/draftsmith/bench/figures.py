"""From counts to figures, each with its definition. The words are architecture.md's."""

from __future__ import annotations

from typing import Any

from draftsmith.engine.metrics import Counters

DEFINITIONS = {
    "acceptance_per_position": "accepted at draft position i / drafts (unconditional, as vLLM counts)",
    "acceptance_conditional": "accepted at position i / drafts whose positions before i were all accepted",
    "acceptance_length": "1 + accepted / drafts; it does not compare methods that draft at different times",
    "tokens_per_target_step": "tokens / (tokens − accepted): answer tokens per forward pass of the target",
    "tokens_per_second": "answer tokens / wall-clock seconds, after a warm-up, summed over the prompt sets",
    "ttft": "seconds from sending the request to the first token",
    "itl": "seconds between two events of the stream; with speculation one event holds 1 + accepted tokens",
    "lossless": "greedy token ids with and without the drafter, one request at a time, are equal; a first difference "
    "whose two top logits lie within two bf16 steps is a tie",
    "interval": "95 % bootstrap interval, resampled over prompts (tokens per second at several at once: over stretches of time)",
}


def acceptance(counts: Counters) -> dict[str, Any]:
    """Acceptance figures of a window; None where there was no draft."""
    if not counts.drafts:
        return {
            "drafts": 0,
            "acceptance_length": None,
            "acceptance_per_position": [],
            "acceptance_conditional": [],
            "tokens_per_target_step": 1.0 if counts.tokens else None,
        }
    per = counts.accepted_per_position
    before = [counts.drafts, *per]
    target_steps = counts.tokens - counts.accepted
    return {
        "drafts": counts.drafts,
        "acceptance_length": round(counts.length, 4),
        "acceptance_per_position": [round(r, 4) for r in counts.rates],
        "acceptance_conditional": [round(n / b, 4) if b else None for n, b in zip(per, before, strict=False)],
        "tokens_per_target_step": round(counts.tokens / target_steps, 4) if target_steps > 0 else None,
    }


def counts_of_steps(steps: list[list[tuple[int, int]]], tokens: int) -> Counters:
    """Counters made of per-request (drafted, accepted) steps. A step without a draft counts no draft, as in vLLM."""
    width = max((d for request in steps for d, _ in request), default=0)
    drafts = drafted = accepted = 0
    per = [0] * width
    for request in steps:
        for d, a in request:
            if d:
                drafts, drafted, accepted = drafts + 1, drafted + d, accepted + a
                for i in range(a):
                    per[i] += 1
    return Counters("steps", drafts, drafted, accepted, per, tokens, speculative=drafts > 0)


def percentile(values: list[float], share: float) -> float | None:
    """The value at `share` (0 to 1) of the sorted list, linear between neighbours; None for an empty one."""
    if not values:
        return None
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: list[float]) -> dict[str, float | None]:
    """Median, 90th and 99th percentile, mean; seconds, rounded to 0.1 ms."""
    if not values:
        return {"p50": None, "p90": None, "p99": None, "mean": None}
    found = {"p50": percentile(values, 0.5), "p90": percentile(values, 0.9), "p99": percentile(values, 0.99)}
    found["mean"] = sum(values) / len(values)
    return {k: round(v, 4) if v is not None else None for k, v in found.items()}
