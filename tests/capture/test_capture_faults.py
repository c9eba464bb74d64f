"""Three servers behind a proxy that spoils a fifth of all answers, one of them dying: nothing lost, doubled or swapped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from capture_support import as_target, write_prompts
from fault_proxy import FaultProxy
from stub_server import Stub, StubServer

from draftsmith.capture.ask import Settings
from draftsmith.capture.plan import plan_prompts
from draftsmith.capture.prompts import Rules
from draftsmith.capture.rows import iter_rows, verify_rows
from draftsmith.capture.run import Servers, capture_rows
from draftsmith.errors import UserError
from draftsmith.target.tokenizer import TargetTokenizer
from draftsmith.ui import QuietUi

Maker = Callable[..., Path]


def test_faults_everywhere_and_a_server_that_dies(tmp_path: Path, byte_tokenizer: Maker) -> None:
    target = as_target(byte_tokenizer())
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": f"question {i}"} for i in range(100)])
    plan = plan_prompts([str(prompts)], [], 0, Rules(), 0.5)
    ui, folder = QuietUi(), tmp_path / "rows"
    with ExitStack() as stack:
        stubs = [StubServer(target, delay=0.01) for _ in range(3)]
        for s in stubs[1:]:
            stack.enter_context(s)
        stubs[0].__enter__()
        proxies = [stack.enter_context(FaultProxy(s.url, 0.2, 1.5, seed=i)) for i, s in enumerate(stubs)]

        def kill_one() -> None:
            while stubs[0].asked < 20:
                time.sleep(0.005)
            stubs[0].__exit__()

        killer = threading.Thread(target=kill_one)
        killer.start()
        servers = Servers([p.url for p in proxies], limit=6, timeout=0.5, backoff=0.02)
        result = capture_rows(
            plan, folder, Settings(seed=3), servers, TargetTokenizer.load(target), ui, samples=2, every_rows=40
        )
        killer.join()
        injected = sum((p.injected for p in proxies), start=type(proxies[0].injected)())
    assert result["rows"] == verify_rows(folder) == 200
    assert set(injected) == {"429", "500", "reset", "stall", "truncated", "wrong ids"}
    assert sum(result["asked_again"].values()) > 15
    stub = Stub(target)
    texts = {p.prompt_id: p.messages for p in plan}
    for row in iter_rows(folder):
        assert row.token_ids[: row.boundary] == stub.render(texts[row.prompt_id])
        assert row.token_ids[row.boundary :] == [*stub.encode(row.answer_text), stub.end]
    assert any("left alone" in w for w in ui.warnings)


def run_plan(tmp_path: Path, urls: list[str], count: int = 5, **servers: float) -> dict[str, object]:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": f"q{i}"} for i in range(count)])
    plan = plan_prompts([str(prompts)], [], 0, Rules(), 0.5)
    made = Servers(urls, limit=4, timeout=2.0, backoff=0.01, **servers)  # type: ignore[arg-type]
    return capture_rows(plan, tmp_path / "rows", Settings(), made, None, QuietUi(), every_rows=10)


def test_servers_share_the_work_by_what_they_have_in_flight(tmp_path: Path, byte_tokenizer: Maker) -> None:
    target = as_target(byte_tokenizer())
    with StubServer(target, delay=0.01) as fast, StubServer(target, delay=0.4) as slow:
        run_plan(tmp_path, [fast.url, slow.url], 120)
    assert fast.asked + slow.asked == 120
    assert fast.asked > slow.asked > 0


def test_a_server_that_comes_back_is_used_again(tmp_path: Path, byte_tokenizer: Maker) -> None:
    target = as_target(byte_tokenizer())
    with StubServer(target, delay=0.02) as steady:
        gone = StubServer(target)
        with gone:
            port = gone.port
        back = StubServer(target, port=port)
        timer = threading.Timer(0.3, back.__enter__)
        timer.start()
        run_plan(tmp_path, [steady.url, f"http://127.0.0.1:{port}"], 200)
        timer.join()
        back.__exit__()
    assert back.asked > 0
    assert steady.asked + back.asked == 200


def test_when_all_stay_dead_capture_stops_and_goes_on_later(tmp_path: Path, byte_tokenizer: Maker) -> None:
    target = as_target(byte_tokenizer())
    server = StubServer(target, delay=0.02)
    server.__enter__()

    def die() -> None:
        while server.asked < 30:
            time.sleep(0.005)
        server.__exit__()

    killer = threading.Thread(target=die)
    killer.start()
    with pytest.raises(UserError, match="no server answers") as e:
        run_plan(tmp_path, [server.url], 100, patience=0.5)
    killer.join()
    assert "goes on from here" in e.value.fix
    kept = verify_rows(tmp_path / "rows")
    assert 20 <= kept < 100
    with StubServer(target) as again:
        run_plan(tmp_path, [again.url], 100)
        assert again.asked == 100 - kept


def test_a_poisonous_prompt_is_given_up_and_the_rest_goes_on(tmp_path: Path, byte_tokenizer: Maker) -> None:
    target = as_target(byte_tokenizer())

    def poisoned(body: dict, reply: dict) -> dict:  # type: ignore[type-arg]
        if body["messages"][0]["content"] == "q7":
            return {"status": 500, "error": {"message": "assert failed"}}
        time.sleep(0.002)
        return reply

    with StubServer(target, poisoned, delay=0.05) as server:
        result = run_plan(tmp_path, [server.url], 150)
    assert result["rows"] == 149
    assert result["answers_given_up"] == {"the server failed at every try": 1}


def test_what_a_server_refuses_is_given_up_at_once(tmp_path: Path, byte_tokenizer: Maker) -> None:
    def too_long(body: dict, reply: dict) -> dict:  # type: ignore[type-arg]
        if body["messages"][0]["content"] == "q1":
            return {"status": 400, "error": {"message": "This model's maximum context length is 8 tokens"}}
        return reply

    with StubServer(as_target(byte_tokenizer()), too_long) as server:
        result = run_plan(tmp_path, [server.url], 9)
        assert server.asked == 9
    assert result["answers_given_up"] == {"prompt too long": 1}
