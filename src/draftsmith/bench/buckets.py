"""Acceptance by the length of the context a draft was made at, and by the writing of the prompt."""

from __future__ import annotations

import unicodedata
from collections import Counter
from typing import Any

from draftsmith.bench.figures import acceptance, counts_of_steps
from draftsmith.bench.load import Request

EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def bucket_of(length: int) -> str:
    """ "128-255" … of a context of `length` tokens."""
    below = max(e for e in EDGES if e <= length)
    above = next((e for e in EDGES if e > length), None)
    return f"{below}-{above - 1}" if above else f"{below}-"


def by_bucket(requests: list[Request]) -> dict[str, Any]:
    """Context length bucket → acceptance figures, each draft counted where it was made. Needs per-step counts."""
    steps: dict[str, list[tuple[int, int]]] = {}
    tokens: Counter[str] = Counter()
    for r in requests:
        length = r.prompt_tokens + 1
        for drafted, accepted in r.steps:
            bucket = bucket_of(length)
            steps.setdefault(bucket, []).append((drafted, accepted))
            tokens[bucket] += accepted + 1
            length += accepted + 1
    order = sorted(steps, key=lambda b: int(b.split("-")[0]))
    return {b: acceptance(counts_of_steps([steps[b]], tokens[b])) for b in order}


SCRIPTS = {
    "LATIN": "latin",
    "CYRILLIC": "cyrillic",
    "GREEK": "greek",
    "ARABIC": "arabic",
    "HEBREW": "hebrew",
    "DEVANAGARI": "devanagari",
    "BENGALI": "bengali",
    "TAMIL": "tamil",
    "THAI": "thai",
    "CJK": "chinese",
    "HIRAGANA": "japanese",
    "KATAKANA": "japanese",
    "HANGUL": "korean",
}


def language_of(text: str) -> str:
    """The writing that most letters of `text` belong to; Japanese where kana stand beside Chinese characters.

    Languages of one script are not told apart: that would need a model, and a wrong guess is worse than none."""
    counts: Counter[str] = Counter()
    for char in text[:2000]:
        if char.isalpha():
            name = SCRIPTS.get(unicodedata.name(char, "").split(" ")[0].split("-")[0])
            if name:
                counts[name] += 1
    if not counts:
        return "none"
    if counts["japanese"] * 10 > counts["chinese"] > 0:
        return "japanese"
    return counts.most_common(1)[0][0]


def by_language(requests: list[Request], prompts: dict[str, str]) -> dict[str, Any]:
    """Writing of the prompt → acceptance figures; {} without per-step counts. prompts: prompt_id → text."""
    groups: dict[str, list[Request]] = {}
    for r in requests:
        if r.steps:
            groups.setdefault(language_of(prompts.get(r.prompt_id, "")), []).append(r)
    return {
        name: acceptance(counts_of_steps([r.steps for r in some], sum(r.tokens for r in some))) | {"prompts": len(some)}
        for name, some in sorted(groups.items())
    }
