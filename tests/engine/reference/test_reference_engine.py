"""The reference engine: exact acceptance on the made-up pair, and greedy texts that no drafting changes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.engine.metrics import read_counters
from draftsmith.engine.reference import ReferenceClient, ReferenceEngine, ngram_proposals
from draftsmith.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[1] / "fixture"))
from exact_pair import write_exact_drafter, write_exact_target


@pytest.mark.parametrize(
    ("proposes", "drafts", "accepted", "per_position"),
    [(0, 12, 36, [12, 12, 12]), (5, 47, 0, [0, 0, 0])],
    ids=["all accepted", "none accepted"],
)
def test_acceptance_is_what_vllm_gives(
    byte_tokenizer: Callable[..., Path],
    tmp_path: Path,
    proposes: int,
    drafts: int,
    accepted: int,
    per_position: list[int],
) -> None:
    target = write_exact_target(byte_tokenizer("exact-target"))
    engine = ReferenceEngine(target, write_exact_drafter(tmp_path / "exact-eagle3", proposes), "drafter", 3)
    steps = list(engine.generate([1, 7, 9, 11], 48, ignore_eos=True))
    assert [t for step in steps for t in step] == [0] * 48
    counters = read_counters(engine.counts.page())
    assert (counters.drafts, counters.drafted, counters.accepted) == (drafts, 3 * drafts, accepted)
    assert counters.accepted_per_position == per_position
    assert counters.tokens == 48


@pytest.mark.parametrize("way", ["none", "ngram"])
def test_texts_are_transformers_own(tiny_target: Path, way: str) -> None:
    engine = ReferenceEngine(tiny_target, None, way, 3)
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    ours = [t for step in engine.generate(prompt, 24, ignore_eos=True) for t in step]
    theirs = engine.states.model.generate(
        torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert ours == theirs[0, len(prompt) :].tolist()


def test_answers_and_ties_through_the_client(tiny_target: Path) -> None:
    client = ReferenceClient(ReferenceEngine(tiny_target, None, "none", 3))
    talk = [{"role": "user", "content": "hello"}]
    stream = asyncio.run(client.stream_chat(talk, max_tokens=5, temperature=0, ignore_eos=True))
    assert (stream.tokens, stream.finish_reason) == (5, "length")
    answer = asyncio.run(client.complete(stream.prompt_token_ids, max_tokens=1, logprobs=2))
    assert answer.top[0][0][0] == stream.token_ids[0]
    assert answer.top[0][0][1] >= answer.top[0][1][1]
    with pytest.raises(UserError, match="greedily"):
        asyncio.run(client.stream_chat(talk, max_tokens=5, temperature=0.7))


def test_ngram_takes_the_longest_and_latest_match() -> None:
    assert ngram_proposals([1, 2, 3, 4, 9, 1, 2, 3, 4], 2) == [9, 1]
    assert ngram_proposals([7, 8, 1, 7, 8, 2, 7, 8], 3) == [2, 7, 8]
    assert ngram_proposals([1, 2, 3], 3) == []
