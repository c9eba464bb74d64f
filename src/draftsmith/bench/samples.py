"""Which tokens of an answer were drafted and accepted, for the report to mark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftsmith.bench.load import Request


def accepted_marks(request: Request) -> list[bool] | None:
    """For each answer token whether it was drafted; None where the server's counts do not cover the answer.

    The first token comes from the prefill. A verifying step then yields its accepted tokens and one of the target's
    own. With the server's per-step counts that is exact; else an event of the stream is taken for one step."""
    if not request.tokens:
        return []
    marks = [False]
    if request.steps:
        for _, accepted in request.steps:
            marks += [True] * accepted + [False]
        if len(marks) >= request.tokens:
            return marks[: request.tokens]
    if sum(n for _, n in request.events) != request.tokens:
        return None
    return [i < n - 1 for _, n in request.events for i in range(n)]


def pieces(token_ids: list[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each token, such that all together are the whole text: a token that ends inside a character gives
    its bytes to the one that completes it."""
    found, shown = [], ""
    for i in range(1, len(token_ids) + 1):
        text = decode(token_ids[:i])
        if text.endswith("\ufffd") and i < len(token_ids):
            found.append("")
            continue
        found.append(text[len(shown) :] if text.startswith(shown) else text)
        shown = text
    return found


def make_samples(
    requests: list[Request], prompts: dict[str, str], decode: Callable[[list[int]], str], per_set: int = 4
) -> list[dict[str, Any]]:
    """[{"set", "prompt", "prompt_id", "tokens": [{"id", "text", "accepted"}]}] of the first `per_set` of each set.
    prompts: prompt_id → text."""
    found: list[dict[str, Any]] = []
    taken: dict[str, int] = {}
    for r in requests:
        marks = accepted_marks(r)
        if marks is None or not r.token_ids or taken.get(r.set, 0) >= per_set:
            continue
        taken[r.set] = taken.get(r.set, 0) + 1
        tokens = zip(r.token_ids, pieces(r.token_ids, decode), marks, strict=True)
        found.append(
            {
                "set": r.set,
                "prompt_id": r.prompt_id,
                "prompt": prompts.get(r.prompt_id, ""),
                "tokens": [{"id": t, "text": s, "accepted": m} for t, s, m in tokens],
            }
        )
    return found
