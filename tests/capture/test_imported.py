"""Logs and conversations taken on trust: each assistant turn one row, boundaries as at inference, ids where the log has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from capture_support import as_target, capture, make_run, write_prompts
from stub_server import StubServer

from draftsmith.capture.preview import coloured, preview_rows
from draftsmith.capture.rows import iter_rows
from draftsmith.capture.stage import STAGE
from draftsmith.errors import UserError
from draftsmith.stage import execute
from draftsmith.target.tokenizer import TargetTokenizer

Maker = Callable[..., Path]
STRIPPING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'].split('</think>')[-1] if not loop.last else "
    "m['content']) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)


def log(answer: dict[str, Any], **response: Any) -> dict[str, Any]:
    request = {"model": "t", "messages": [{"role": "user", "content": "hi"}]}
    return {"request": request, "response": {"model": "t-7b", "choices": [answer], **response}}


def trusted(tmp_path: Path, target: Path, records: list[Any], **section: Any) -> tuple[list[Any], dict[str, Any]]:
    prompts = write_prompts(tmp_path / "p.jsonl", records)
    run = make_run(tmp_path, target, [str(prompts)], [], trust_answers=True, **section)
    result = execute(STAGE, run)["result"]
    return list(iter_rows(run.stage_dir("capture"))), result


def test_each_assistant_turn_is_a_row_of_its_own_words(tmp_path: Path, byte_tokenizer: Maker) -> None:
    target = as_target(byte_tokenizer())
    tok = TargetTokenizer.load(target)
    talk = [("human", "one"), ("gpt", "first"), ("human", "two"), ("gpt", "second")]
    records = [{"conversations": [{"from": f, "value": v} for f, v in talk]}]
    rows, result = trusted(tmp_path, target, records)
    said = [(tok.decode(r.token_ids[: r.boundary]), tok.decode(r.token_ids[r.boundary :])) for r in rows]
    opening = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert said[0] == (opening, "first<|im_end|>")
    assert said[1] == (
        opening + "first<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n",
        "second<|im_end|>",
    )
    assert result["trusted"]
    assert math.isnan(rows[0].temperature)


def test_a_turn_that_says_nothing_does_not_cost_the_others(tmp_path: Path, byte_tokenizer: Maker) -> None:
    """This template does not render tool calls: the call's own turn is empty, the answer after it is not."""
    call = {"type": "function", "function": {"name": "w", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "Sunny."},
    ]
    target = as_target(byte_tokenizer())
    rows, result = trusted(
        tmp_path, target, [{"messages": talk}, {"messages": talk[:3]}, "no answer at all"], max_dropped=0.9
    )
    assert [(r.turn, r.answer_text) for r in rows] == [(1, "Sunny.")]
    assert result["turns_left_out"] == {"no answer in the record": 1}
    assert result["answers_given_up"] == {"no answer in the record": 2}


def test_the_logs_own_ids_are_taken_where_they_are(tmp_path: Path, byte_tokenizer: Maker) -> None:
    answer = {"message": {"role": "assistant", "content": "yo"}, "finish_reason": "stop", "token_ids": [200, 201, 2]}
    rows, _ = trusted(tmp_path, as_target(byte_tokenizer()), [log(answer, prompt_token_ids=[1, 50, 60])])
    assert (rows[0].token_ids, rows[0].boundary, rows[0].server_model) == ([1, 50, 60, 200, 201, 2], 3, "t-7b")


def test_a_cut_answer_gets_no_end_that_it_never_had(tmp_path: Path, byte_tokenizer: Maker) -> None:
    target = as_target(byte_tokenizer())
    answer = {"message": {"role": "assistant", "content": "yo and"}, "finish_reason": "length"}
    rows, result = trusted(tmp_path, target, [log(answer)])
    assert TargetTokenizer.load(target).decode(rows[0].token_ids[rows[0].boundary :]) == "yo and"
    assert result["finish_reasons"] == {"length": 1}


def test_a_prefilled_thought_is_split_at_the_common_prefix(tmp_path: Path, byte_tokenizer: Maker) -> None:
    target = as_target(byte_tokenizer(template=STRIPPING))
    tok = TargetTokenizer.load(target)
    thought = {"message": {"role": "assistant", "content": "<think>hm</think>yo"}, "finish_reason": "stop"}
    plain = {"message": {"role": "assistant", "content": "yo"}, "finish_reason": "stop"}
    rows, _ = trusted(tmp_path, target, [log(thought), {**log(plain), "id": 2}])
    answers = [tok.decode(r.token_ids[r.boundary :]) for r in rows]
    assert answers == ["hm</think>yo<|im_end|>", "yo<|im_end|>"]


def test_by_default_logged_answers_are_asked_again(tmp_path: Path, byte_tokenizer: Maker) -> None:
    answer = {"message": {"role": "assistant", "content": "foreign"}, "finish_reason": "stop"}
    rows, _, _ = capture(tmp_path, as_target(byte_tokenizer()), [log(answer)])
    assert rows[0].answer_text.startswith("answer ")
    assert rows[0].server_model == "stub"


def test_prompts_without_answers_cannot_be_trusted(tmp_path: Path, byte_tokenizer: Maker) -> None:
    with pytest.raises(UserError, match="1 no answer in the record"):
        trusted(tmp_path, as_target(byte_tokenizer()), ["just a prompt"])


def test_several_samples_mix_their_temperatures(tmp_path: Path, byte_tokenizer: Maker) -> None:
    rows, _, _ = capture(tmp_path, as_target(byte_tokenizer()), ["a", "b"], samples=3, temperatures=[0.0, 0.9])
    assert sorted((r.sample, r.temperature) for r in rows) == sorted([(0, 0.0), (1, 0.9), (2, 0.0)] * 2)


def test_tools_reach_server_and_template(tmp_path: Path, byte_tokenizer: Maker) -> None:
    template = "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}{{ messages[-1]['content'] }}"
    target = as_target(byte_tokenizer(template=template))
    asked: list[Any] = []

    def with_tools(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        asked.append(body.get("tools"))
        reply["prompt_token_ids"] = TargetTokenizer.load(target).encode("[add]hi")
        reply["choices"][0]["finish_reason"] = "tool_calls"
        return reply

    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows, _, _ = capture(tmp_path, target, [{"prompt": "hi", "tools": tools}], with_tools)
    assert asked == [tools]
    assert rows[0].finish_reason == "tool_calls"


def test_tool_arguments_go_over_the_wire_as_strings(tmp_path: Path, byte_tokenizer: Maker) -> None:
    template = (
        "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{% for k, v in "
        "c['function']['arguments'] | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    )
    target = as_target(byte_tokenizer(template=template))
    asked: list[Any] = []

    def serve(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        asked.append(body["messages"])
        text = "add" if len(body["messages"]) == 1 else "adda=1;2"
        reply["prompt_token_ids"] = TargetTokenizer.load(target).encode(text)
        return reply

    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    rows, _, _ = capture(tmp_path, target, [{"messages": talk}], serve)
    assert [r.turn for r in rows] == [0, 1]
    sent = next(m for m in asked if len(m) == 3)
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert sent[1]["tool_calls"][0]["type"] == "function"


def test_a_preview_asks_but_stores_nothing_and_marks_what_is_learnt(tmp_path: Path, byte_tokenizer: Maker) -> None:
    target = as_target(byte_tokenizer())
    prompts = write_prompts(tmp_path / "p.jsonl", [f"n{i}" for i in range(9)])
    with StubServer(target) as server:
        run = make_run(tmp_path, target, [str(prompts)], [server.url])
        rows = list(preview_rows(run, 2))
        assert server.asked == 2
    assert not run.folder.exists()
    text = coloured(rows[0], TargetTokenizer.load(target), colours=False).plain
    assert f"⟦{rows[0].answer_text}<|im_end|>⟧" in text
    assert f"{rows[0].boundary} prompt tokens" in text
    shown = coloured(rows[0], TargetTokenizer.load(target))
    green = [shown.plain[s.start : s.end] for s in shown.spans if "green" in str(s.style)]
    assert green == [rows[0].answer_text + "<|im_end|>"]
