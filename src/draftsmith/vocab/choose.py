"""Choosing the draft vocabulary: the tokens that the target itself writes most, and those that no drafter may lack.

A token that is not in the draft vocab can never be proposed, and loss and accuracy do not show it (targets are cut the
same way), so coverage is measured on answer tokens, and once more on prompts that had no say in the choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.errors import UserError
from draftsmith.target.tokenizer import TargetTokenizer, stop_ids
from draftsmith.vocab.map import VocabMap

Counts = np.ndarray[Any, np.dtype[np.int64]]

MARKS = ("think", "tool", "function", "channel", "message", "reason", "header", "turn", "call", "im_", "eot", "eom")
"""What the names of structural added tokens hold (<think>, <tool_call>, <|channel|>, <|im_end|>); these are always in."""

UNSEEN_SPECIALS = 0.25
"""Share of the slots that special tokens never seen may take (Llama-3 reserves 256 that no answer holds)."""

HELD_OUT_SHARE = 26 / 256
"""Share of the prompts, by hash, on which coverage is measured with a map chosen from the others."""


@dataclass(frozen=True)
class Forced:
    """must: ids without which drafts go wrong at every turn's end. specials: all other added tokens."""

    must: list[int]
    specials: list[int]


@dataclass(frozen=True)
class Choice:
    """The map and how it came about. filler: slots taken by tokens never seen; left_out: specials without a slot."""

    map: VocabMap
    coverage: float
    forced: int
    filler: int
    left_out: int


def is_held_out(prompt_id: str) -> bool:
    """Whether a prompt's rows are the ones that coverage is tested on; the same for every run and row order."""
    return sha256(f"coverage:{prompt_id}".encode()).digest()[0] < round(HELD_OUT_SHARE * 256)


def count_answers(rows: Iterable[tuple[str, Sequence[int]]], vocab_size: int) -> tuple[Counts, Counts]:
    """How often each target id is in the answers: int64 [V] of the prompts that have a say, and of the held-out ones.

    rows: (prompt id, answer token ids). UserError for an id outside the vocabulary."""
    totals = (np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64))
    waiting: tuple[list[int], list[int]] = ([], [])

    def settle(side: int) -> None:
        ids = np.array(waiting[side], np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            raise UserError(
                f"the captured answers hold token id {int(ids.max())}; the target's vocabulary has {vocab_size:,}",
                "the rows were captured from another model, or config.json is not the served one's",
                "capture again from the target",
            )
        totals[side].__iadd__(np.bincount(ids, minlength=vocab_size))
        waiting[side].clear()

    for prompt_id, ids in rows:
        side = int(is_held_out(prompt_id))
        waiting[side].extend(ids)
        if len(waiting[side]) > 1_000_000:
            settle(side)
    settle(0)
    settle(1)
    return totals


def coverage(counts: Counts, t2d: np.ndarray[Any, Any]) -> float:
    """Share of the counted tokens that the map can draft; 1.0 where nothing was counted."""
    whole = int(counts.sum())
    return float(counts[t2d].sum() / whole) if whole else 1.0


def choose(counts: Counts, size: int, forced: Forced) -> Choice:
    """The map of `size` tokens. Ties go to the lower id; free slots to unseen ids, specials first, then in id order.

    UserError where size is larger than the vocabulary or too small for what is forced in."""
    vocab = len(counts)
    if not 0 < size <= vocab:
        raise UserError(
            f"vocab.size is {size:,}, the target's vocabulary has {vocab:,}",
            "a draft vocab is a part of the target's",
            f"give at most {vocab:,}",
        )
    must = [i for i in dict.fromkeys(forced.must) if 0 <= i < vocab]
    specials = [i for i in dict.fromkeys(forced.specials) if 0 <= i < vocab and i not in set(must)]
    seen = [i for i in specials if counts[i]]
    unseen = [i for i in specials if not counts[i]]
    room = max(min(int(size * UNSEEN_SPECIALS), size - len(must) - len(seen)), 0)
    chosen = dict.fromkeys([*must, *seen, *unseen[:room]])
    if len(must) + len(seen) > size:
        raise UserError(
            f"vocab.size is {size:,}, but {len(must) + len(seen):,} tokens must be in: ends of turns, specials, vocab.force",
            "without them the drafter fails at every turn's end",
            "raise vocab.size",
        )
    forced_in = len(chosen)
    order = np.lexsort((np.arange(vocab), -counts))
    for i in order.tolist():
        if len(chosen) == size or not counts[i]:
            break
        chosen.setdefault(i)
    free = size - len(chosen)
    for i in [*unseen, *range(vocab)]:
        if len(chosen) == size:
            break
        chosen.setdefault(i)
    made = VocabMap.from_ids(chosen, vocab)
    left_out = sum(i not in chosen for i in unseen)
    return Choice(made, coverage(counts, made.t2d), forced_in, free, left_out)


def added_tokens(folder: Path) -> dict[int, tuple[str, bool]]:
    """id → (text, special) of the tokens that stand outside the tokenizer's model, read from its files."""
    out: dict[int, tuple[str, bool]] = {}
    for name, key in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")):
        try:
            raw = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        out |= dict(_entries(raw.get(key)))
    return out


def _entries(raw: Any) -> Iterator[tuple[int, tuple[str, bool]]]:
    listed = raw.items() if isinstance(raw, dict) else [(t.get("id"), t) for t in raw or [] if isinstance(t, dict)]
    for number, token in listed:
        if number is not None and isinstance(token, dict) and str(number).isdigit():
            yield int(number), (str(token.get("content", "")), bool(token.get("special")))


def forced_tokens(folder: Path, tokenizer: TargetTokenizer | None, texts: Sequence[str]) -> Forced:
    """What must be in a target's draft vocab: every end of generation (one id or a list), the end of a turn, thinking and
    tool-call marks, `texts` of the recipe (each as the tokenizer writes it), and all other specials.

    UserError for texts where the tokenizer cannot be loaded."""
    added = added_tokens(folder)
    must = [*stop_ids(folder), *(tokenizer.end_of_turn_ids if tokenizer else [])]
    must += [i for i, (text, _) in sorted(added.items()) if _structural(text)]
    if texts and tokenizer is None:
        raise UserError(
            "vocab.force needs the target's tokenizer, which cannot be loaded here",
            "texts become ids by it",
            "set target.trust_remote_code if you trust its code, or leave vocab.force empty",
        )
    for text in texts:
        assert tokenizer is not None
        must += tokenizer.encode(text)
    specials = [*sorted(added), *(tokenizer.special_ids if tokenizer else [])]
    return Forced(list(dict.fromkeys(must)), list(dict.fromkeys(specials)))


def _structural(text: str) -> bool:
    low = text.lower()
    return "reserved" not in low and any(mark in low for mark in MARKS)
