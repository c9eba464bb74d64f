"""Capture against a deterministic server: what becomes a row, what is refused, what is counted."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from capture_support import as_target, make_run, write_prompts
from stub_server import Stub, StubServer

from draftsmith.capture.rows import iter_rows, verify_rows
from draftsmith.capture.stage import STAGE
from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.stage import execute

Maker = Callable[..., Path]


@pytest.fixture
def target(byte_tokenizer: Maker) -> Path:
    return as_target(byte_tokenizer("target"))


def test_rows_hold_the_servers_ids_and_the_contract_is_begun(tmp_path: Path, target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": f"Frage {i} é"} for i in range(20)])
    with StubServer(target) as server:
        run = make_run(tmp_path, target, [str(prompts)], [server.url], samples=2)
        record = execute(STAGE, run)
        assert execute(STAGE, run)["skipped"]
        assert server.asked == 40
    rows = list(iter_rows(run.stage_dir("capture")))
    assert len({r.row_id for r in rows}) == verify_rows(run.stage_dir("capture")) == 40
    stub = Stub(target)
    for row in rows:
        prompt_ids, answer = row.token_ids[: row.boundary], row.token_ids[row.boundary :]
        assert prompt_ids[0] == stub.start
        assert answer == [*stub.encode(row.answer_text), stub.end]
        assert (row.finish_reason, row.server_model, row.source) == ("stop", "stub", "p")
    assert record["result"]["finish_reasons"] == {"stop": 40}
    contract = Contract.load(run.stage_dir("capture"))
    assert contract.data_hash == record["result"]["output_hash"]
    assert contract.tokenizer_hash
    assert contract.target.vocab_size == 320


def test_cut_empty_and_long_ones_are_counted(tmp_path: Path, target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": f"n{i}"} for i in range(9)] + [{"prompt": "x" * 300}])

    def empty_first(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        if body["messages"][0]["content"] == "n0":
            choice = reply["choices"][0]
            choice["message"]["content"], choice["token_ids"] = None, choice["token_ids"][-1:]
            reply["usage"]["completion_tokens"] = 1
        return reply

    with StubServer(target, empty_first) as server:
        run = make_run(tmp_path, target, [str(prompts)], [server.url], max_tokens=16, max_prompt_tokens=200)
        result = execute(STAGE, run)["result"]
    assert result["answers_given_up"] == {"empty answer": 1, "prompt too long": 1}
    assert result["rows"] == 8
    cut = [r for r in iter_rows(run.stage_dir("capture")) if r.finish_reason == "length"]
    assert result["finish_reasons"].get("length", 0) == len(cut) > 0
    assert all(r.token_ids[-1] != 2 for r in cut)
    assert any("empty answer" in n for n in run.ui.notes)  # type: ignore[attr-defined]


def test_reasoning_without_content_is_an_answer(tmp_path: Path, target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", ["a", "b", "c"])

    def to_reasoning(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        message = reply["choices"][0]["message"]
        name = {"a": "reasoning", "b": "reasoning_content", "c": "thinking"}[body["messages"][0]["content"]]
        message[name], message["content"] = message["content"], None
        return reply

    with StubServer(target, to_reasoning) as server:
        run = make_run(tmp_path, target, [str(prompts)], [server.url])
        assert execute(STAGE, run)["result"]["rows"] == 3


def test_a_server_that_renders_otherwise_is_stopped_at_the_first_row(tmp_path: Path, target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [f"n{i}" for i in range(50)])

    def other_template(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        reply["prompt_token_ids"] = [1, 1, *reply["prompt_token_ids"]]
        return reply

    with StubServer(target, other_template) as server:
        run = make_run(tmp_path, target, [str(prompts)], [server.url])
        with pytest.raises(UserError, match="renders the first prompt otherwise") as e:
            execute(STAGE, run)
        assert "at token 1 of" in e.value.what
        assert server.asked < 10


def test_a_server_without_ids_is_refused(tmp_path: Path, target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", ["a"])

    def no_ids(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        del reply["prompt_token_ids"], reply["choices"][0]["token_ids"]
        return reply

    with StubServer(target, no_ids) as server, pytest.raises(UserError, match="without token ids"):
        execute(STAGE, make_run(tmp_path, target, [str(prompts)], [server.url]))


def test_another_answers_ids_never_become_a_row(tmp_path: Path, target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [f"n{i}" for i in range(12)])
    stub, seen = Stub(target), set()

    def swapped_once(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        name = body["messages"][0]["content"]
        if name not in seen:
            seen.add(name)
            ids = [*stub.encode("answer of another"), stub.end]
            reply["choices"][0]["token_ids"], reply["usage"]["completion_tokens"] = ids, len(ids)
        return reply

    with StubServer(target, swapped_once) as server:
        run = make_run(tmp_path, target, [str(prompts)], [server.url])
        result = execute(STAGE, run)["result"]
    assert result["rows"] == 12
    assert result["asked_again"] == {"ids and text of the answer disagree": 12}
    for row in iter_rows(run.stage_dir("capture")):
        assert row.token_ids[row.boundary :] == [*stub.encode(row.answer_text), stub.end]


def test_a_dead_address_is_one_block(tmp_path: Path, target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", ["a"])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    run = make_run(tmp_path, target, [str(prompts)], [f"http://127.0.0.1:{port}"])
    with pytest.raises(UserError, match="no server answers") as e:
        execute(STAGE, run)
    assert e.value.code == 2
    assert not (run.stage_dir("capture") / "run.json").exists()


def test_no_chat_template_is_refused_unless_raw(tmp_path: Path, byte_tokenizer: Maker) -> None:
    base = as_target(byte_tokenizer("base", template=None))
    prompts = write_prompts(tmp_path / "p.jsonl", ["Once upon", "The capital"])
    with StubServer(base) as server:
        with pytest.raises(UserError, match="no chat template"):
            execute(STAGE, make_run(tmp_path, base, [str(prompts)], [server.url]))
        assert server.asked == 0
        run = make_run(tmp_path, base, [str(prompts)], [server.url], mode="raw")
        assert execute(STAGE, run)["result"]["rows"] == 2
    assert {r.boundary for r in iter_rows(run.stage_dir("capture"))} == {len("Once upon"), len("The capital")}


def test_where_the_tokenizer_is_remote_code_the_server_renders(tmp_path: Path, target: Path) -> None:
    (target / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    config = json.loads((target / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_x.X", None]}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    prompts = write_prompts(tmp_path / "p.jsonl", ["a", "b"])
    with StubServer(tmp_path) as server:
        run = make_run(tmp_path, target, [str(prompts)], [server.url])
        assert execute(STAGE, run)["result"]["rows"] == 2
    assert any("/tokenize" in w for w in run.ui.warnings)  # type: ignore[attr-defined]


def test_each_turn_of_a_conversation_is_a_row_after_the_targets_own_answers(tmp_path: Path, target: Path) -> None:
    talk = [
        {"from": "human", "value": "one"},
        {"from": "gpt", "value": "foreign words"},
        {"from": "human", "value": "two"},
        {"from": "gpt", "value": "more foreign words"},
    ]
    prompts = write_prompts(tmp_path / "p.jsonl", [{"conversations": talk}])
    with StubServer(target) as server:
        run = make_run(tmp_path, target, [str(prompts)], [server.url], system="Be brief.")
        execute(STAGE, run)
    stub = Stub(target)
    first, second = iter_rows(run.stage_dir("capture"))
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert first.token_ids[: first.boundary] == stub.render(opening)
    reply = {"role": "assistant", "content": first.answer_text}
    assert second.token_ids[: second.boundary] == stub.render([*opening, reply, {"role": "user", "content": "two"}])
    assert (first.turn, second.turn) == (0, 1)
