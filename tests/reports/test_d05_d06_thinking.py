"""D05, D06: templates that strip past thinking and put an empty block on the last turn (SpecForge#419, #296, Automodel#3738).

One row per turn with the history rendered as at inference; tokens that the generation prompt supplies stay before the
boundary; the mode is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from capture_support import as_target, capture
from stub_server import Stub, StubServer

from draftsmith.target.tokenizer import TargetTokenizer

QWEN3_LIKE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'].split('</think>')[-1]) + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


class ThinkingStub(Stub):
    """Renders as the template above; answers with a thought before the words."""

    def __init__(self, target: Path) -> None:
        super().__init__(target)
        self.tok = TargetTokenizer.load(target)

    def reply(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        ids = self.tok.inner.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=False, **body.get("chat_template_kwargs", {})
        )
        off = body.get("chat_template_kwargs", {}).get("enable_thinking") is False
        thought = "" if off else "<think>hm</think>"
        text = self.words(ids, 0)
        answer = [*self.tok.encode(thought), *self.encode(text), self.end]
        message = {"role": "assistant", "content": text, "reasoning": "hm" if thought else None}
        return {
            "model": "m",
            "prompt_token_ids": list(ids),
            "usage": {"completion_tokens": len(answer)},
            "choices": [{"message": message, "finish_reason": "stop", "token_ids": answer}],
        }


@pytest.mark.parametrize("mode", ["default", "on", "off"])
def test_each_turn_sees_the_history_of_inference(
    tmp_path: Path, byte_tokenizer: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    target = as_target(byte_tokenizer(template=QWEN3_LIKE))
    monkeypatch.setattr(StubServer, "stub_class", ThinkingStub)
    rows, _, _ = capture(tmp_path, target, [{"turns": ["one", "two"]}], thinking=mode)
    tok = TargetTokenizer.load(target)
    assert [r.thinking for r in rows] == [mode, mode]
    prompts = [tok.decode(r.token_ids[: r.boundary]) for r in rows]
    answers = [tok.decode(r.token_ids[r.boundary :]) for r in rows]
    block = "<think>\n\n</think>\n\n" if mode == "off" else ""
    opening = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[0] == opening + block
    # the second prompt is no extension of the first turn: past thinking and the empty block are gone
    said = rows[0].answer_text
    assert prompts[1] == f"{opening}{said}<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n{block}"
    assert all(a.startswith("<think>hm</think>") is (mode != "off") for a in answers)
