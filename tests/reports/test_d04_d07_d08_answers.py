"""D04, D07, D08: ids of re-tokenised text, the reasoning field's name, truncated answers (speculators#729, #835,
NemoClaw#8878, vllm#52640)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from capture_support import as_target, capture
from stub_server import Stub

from draftsmith.target.tokenizer import TargetTokenizer

Maker = Callable[..., Path]


def test_the_ids_are_the_servers_not_those_of_the_text(tmp_path: Path, byte_tokenizer: Maker) -> None:
    """The target may write "filler0" byte by byte or as one token; both are the same text."""
    target = as_target(byte_tokenizer())
    tok = TargetTokenizer.load(target)
    whole = tok.inner.convert_tokens_to_ids("Ġfiller0")

    def one_token(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        ids = [whole, 2]
        reply["choices"][0] |= {"token_ids": ids, "message": {"role": "assistant", "content": " filler0"}}
        reply["usage"]["completion_tokens"] = len(ids)
        return reply

    rows, _, _ = capture(tmp_path, target, ["a"], one_token)
    assert rows[0].token_ids[rows[0].boundary :] == [whole, 2]
    assert tok.encode(" filler0") != [whole]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_thinking_under_any_name_is_an_answer(tmp_path: Path, byte_tokenizer: Maker, name: str) -> None:
    def think(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        message = reply["choices"][0]["message"]
        message[name], message["content"] = message["content"], None
        return reply

    rows, result, _ = capture(tmp_path, as_target(byte_tokenizer()), ["a", "b"], think)
    assert len(rows) == 2
    assert result["answers_given_up"] == {}


def test_truncated_answers_are_counted_and_get_no_end(tmp_path: Path, byte_tokenizer: Maker) -> None:
    target = as_target(byte_tokenizer())
    rows, result, ui = capture(tmp_path, target, [f"n{i}" for i in range(20)], max_tokens=22)
    cut = [r for r in rows if r.finish_reason == "length"]
    assert 0 < len(cut) < 20
    assert result["finish_reasons"] == {"length": len(cut), "stop": 20 - len(cut)}
    end = Stub(target).end
    assert all((r.token_ids[-1] == end) is (r.finish_reason == "stop") for r in rows)
    assert any(f"length: {len(cut)}" in n for n in ui.notes)


def test_cut_in_the_middle_of_thinking_is_kept_and_marked(tmp_path: Path, byte_tokenizer: Maker) -> None:
    def thinking_cut(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        choice = reply["choices"][0]
        choice["message"] = {"role": "assistant", "content": None, "reasoning": choice["message"]["content"]}
        choice["finish_reason"] = "length"
        return reply

    rows, _, _ = capture(tmp_path, as_target(byte_tokenizer()), ["a"], thinking_cut)
    assert [r.finish_reason for r in rows] == ["length"]
