"""Which prompts are answered: every source read twice in constant memory, first to decide, then to hand them out.

Decided per record: unusable (by reason), held out (a user turn equal to one of a measured set, by content hash),
duplicate, not chosen (a source's COUNT, chosen by the seed), or kept.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftsmith.capture.prompts import Dropped, Prompt, Rules, first_turn_hash
from draftsmith.capture.sources import Source, open_source
from draftsmith.errors import UserError

HELD_OUT, DUPLICATE, NOT_CHOSEN = "held out", "duplicate", "not chosen (COUNT)"
NO_FAULT = frozenset({HELD_OUT, DUPLICATE, NOT_CHOSEN})
"""Reasons that do not count towards max_dropped: nothing is wrong with such records."""


def summary(kept: int, dropped: Counter[str]) -> str:
    """ "kept 4,812, dropped 188: 131 starts with the assistant, 57 no user turn"."""
    parts = ", ".join(f"{n:,} {reason}" for reason, n in dropped.most_common())
    return f"kept {kept:,}, dropped {sum(dropped.values()):,}" + (f": {parts}" if parts else "")


def require_share(kept: int, dropped: Counter[str], most: float, what: str) -> None:
    """UserError if the faulty share is over `most` (a share of all that were looked at), or nothing is left."""
    faults = sum(n for reason, n in dropped.items() if reason not in NO_FAULT)
    if kept and faults <= most * (kept + faults):
        return
    raise UserError(
        f"{what}: {summary(kept, dropped)}",
        "so much loss means that the data is not in the form that was taken for granted"
        if kept
        else "there is nothing to learn from",
        "mend the data, or raise capture.max_dropped if this is as it should be",
    )


@dataclass
class Plan:
    """The kept prompts of some sources. hashes: uint64 [kept], the prompt ids as numbers, in order of handing out."""

    sources: list[Source]
    rules: Rules
    keep: list[np.ndarray[Any, Any]] = field(default_factory=list)
    hashes: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty(0, np.uint64))
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return len(self.hashes)

    def __iter__(self) -> Iterator[Prompt]:
        """The kept prompts in file order, source after source, read anew."""
        for source, keep in zip(self.sources, self.keep, strict=True):
            for flag, item in zip(keep, source.prompts(self.rules), strict=True):
                if flag and isinstance(item, Prompt):
                    yield item


def held_out_hashes(specs: Sequence[str]) -> set[int]:
    """Hashes of the first user turns of the measured sets."""
    out: set[int] = set()
    for spec in specs:
        source = open_source(spec)
        rules = Rules()
        for item in source.prompts(rules):
            if isinstance(item, Prompt):
                out.add(first_turn_hash(item.first_user))
    return out


def _is_held_out(prompt: Prompt, held: set[int]) -> bool:
    return any(first_turn_hash(str(m["content"])) in held for m in prompt.messages if m["role"] == "user")


def _mixed(hashes: np.ndarray[Any, Any], seed: int) -> np.ndarray[Any, Any]:
    """The hashes in another order for each seed (splitmix64 of hash + seed)."""
    with np.errstate(over="ignore"):
        z = hashes + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def plan_prompts(specs: Sequence[str], held_out: Sequence[str], seed: int, rules: Rules, max_dropped: float) -> Plan:
    """Read all sources once and decide. UserError at the first broken line, and if too much is unusable."""
    plan = Plan([open_source(s) for s in specs], rules)
    held = held_out_hashes(held_out)
    found: list[np.ndarray[Any, Any]] = []
    for source in plan.sources:
        hashes, usable = array("Q"), array("B")
        for item in source.prompts(rules):
            ok = False
            if isinstance(item, Dropped):
                plan.dropped[item.reason] += 1
            elif held and _is_held_out(item, held):
                plan.dropped[HELD_OUT] += 1
            else:
                ok = True
            hashes.append(int(item.prompt_id, 16) if ok and isinstance(item, Prompt) else 0)
            usable.append(ok)
        found.append(np.frombuffer(hashes, np.uint64).copy() if hashes else np.empty(0, np.uint64))
        plan.keep.append(np.frombuffer(usable, np.uint8).astype(bool) if usable else np.empty(0, bool))
    _drop_duplicates(plan, found)
    for source, keep, hashes_ in zip(plan.sources, plan.keep, found, strict=True):
        at = np.flatnonzero(keep)
        if source.count is not None and len(at) > source.count:
            order = np.argsort(_mixed(hashes_[at], seed), kind="stable")
            keep[at[order[source.count :]]] = False
            plan.dropped[NOT_CHOSEN] += len(at) - source.count
    plan.hashes = np.concatenate([h[k] for h, k in zip(found, plan.keep, strict=True)]) if found else plan.hashes
    require_share(plan.total, plan.dropped, max_dropped, ", ".join(specs))
    return plan


def _drop_duplicates(plan: Plan, found: list[np.ndarray[Any, Any]]) -> None:
    """Keep the first of equal prompts over all sources."""
    flat = np.concatenate(found) if found else np.empty(0, np.uint64)
    keep = np.concatenate(plan.keep) if plan.keep else np.empty(0, bool)
    at = np.flatnonzero(keep)
    _, first = np.unique(flat[at], return_index=True)
    chosen = np.zeros(len(flat), bool)
    chosen[at[first]] = True
    if extra := len(at) - len(first):
        plan.dropped[DUPLICATE] += extra
    start = 0
    for i, part in enumerate(found):
        plan.keep[i] = chosen[start : start + len(part)]
        start += len(part)
