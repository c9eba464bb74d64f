"""The bench against a server whose latencies and counters are known: figures within 1 %, restarts never averaged over."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.bench.adhoc import Asked, measure
from draftsmith.bench.markdown import to_markdown
from draftsmith.engine.metrics import CounterResetError
from draftsmith.errors import UserError
from draftsmith.ui import QuietUi

sys.path.insert(0, str(Path(__file__).parent))
from fake_endpoint import FakeEndpoint


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(12)), encoding="utf-8")
    return str(path)


def ask(prompts: str, endpoint: FakeEndpoint, baseline: FakeEndpoint | None = None, **more: Any) -> Asked:
    settings: dict[str, Any] = {
        "concurrency": [4, 1],
        "max_tokens": 25,
        "single_prompts": 6,
        "single_max_tokens": 25,
        "ways": ["drafter", "none"],
        "baseline": baseline.url if baseline else None,
    }
    return Asked(prompts=[prompts], endpoint=endpoint.url, **settings | more)


def test_known_counters_come_back(prompts: str, tmp_path: Path) -> None:
    with FakeEndpoint(pattern=[2, 0, 1]) as server:
        bench = measure(ask(prompts, server), tmp_path / "out", QuietUi())
    # 25 tokens: 1, then 2+1, 0+1, 1+1 repeated: 6 tokens in 3 steps, four times.
    assert bench["drafts"] == 12 * 12
    assert bench["acceptance_per_position"] == [round(2 / 3, 4), round(1 / 3, 4), 0.0]
    assert bench["acceptance_conditional"] == [round(2 / 3, 4), 0.5, 0.0]
    assert bench["acceptance_length"] == 2.0
    assert bench["tokens_per_target_step"] == pytest.approx(25 / 13, rel=1e-4)
    assert bench["sets"]["prompts"]["drafts"] == 12 * 12
    assert sum(b["drafts"] for b in bench["by_context_length"].values()) == 12 * 12
    assert bench["by_language"]["latin"]["prompts"] == 12
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["drafts"] == 12 * 12
    assert "| endpoint | 4 |" in to_markdown(bench)


@pytest.mark.slow
def test_known_latencies_come_back_within_one_percent(prompts: str, tmp_path: Path) -> None:
    """On the wire and the wall clock; test_load.py does the same on a clock of its own, whatever the machine does."""
    with FakeEndpoint(pattern=[2, 0, 1], ttft=1.0, itl=0.5) as server, FakeEndpoint(None, ttft=1.0, itl=0.5) as plain:
        settings = {"concurrency": [1], "single_prompts": 2, "single_max_tokens": 7}
        bench = measure(ask(prompts, server, plain, **settings), tmp_path / "out", QuietUi())
    speed, alone = (bench["ways"][w]["speed"]["1"] for w in ("endpoint", "none"))
    assert speed["ttft"]["p50"] == pytest.approx(1.0, rel=0.01)
    assert speed["itl"]["p50"] == pytest.approx(0.5, rel=0.01)
    assert speed["tokens_per_second"] == pytest.approx(7 / 2.5, rel=0.01)
    assert alone["tokens_per_second"] == pytest.approx(7 / 4.0, rel=0.01)
    assert bench["speedup"]["1"] == pytest.approx(4.0 / 2.5, rel=0.01)
    assert bench["lossless"] is True


def test_without_per_request_counts_events_stand_in(prompts: str, tmp_path: Path) -> None:
    with FakeEndpoint(pattern=[2, 0, 1], per_request=False) as server:
        bench = measure(ask(prompts, server), tmp_path / "out", QuietUi())
    assert bench["acceptance_length"] == 2.0
    low, high = bench["interval"]["tokens_per_target_step"]
    assert low <= bench["tokens_per_target_step"] <= high
    assert bench["by_context_length"] == {}


@pytest.mark.parametrize("reset_after", [10, 20])
def test_a_restart_inside_is_refused(prompts: str, tmp_path: Path, reset_after: int) -> None:
    with FakeEndpoint(reset_after=reset_after) as server, pytest.raises(CounterResetError, match="reset"):
        measure(ask(prompts, server), tmp_path / "out", QuietUi())
    assert not (tmp_path / "out" / "bench.json").exists()


def test_a_difference_is_told_from_a_tie(prompts: str, tmp_path: Path) -> None:
    def other(i: int) -> int:
        return 101 if i == 3 else 100

    def same(i: int) -> int:
        return 100

    for gap, verdict in ((0.25, "tie"), (0.5, "difference")):
        top = {"100": 20.0, "101": 20.0 - gap}  # a bf16 step at 20 is 0.125
        with FakeEndpoint(token=other) as server, FakeEndpoint(None, token=same, top=lambda _, t=top: t) as plain:
            bench = measure(ask(prompts, server, plain), tmp_path / verdict, QuietUi())
        first = bench["losslessness"]["differences"][0]
        assert (first["verdict"], first["at"], first["tokens"]) == (verdict, 3, [100, 101])
        assert bench["lossless"] is (verdict == "tie")
        assert bench["ties"] == (6 if verdict == "tie" else 0)
        assert bench["losslessness"]["batched"]["equal"] == 0
    assert any("not lossless" in n for n in bench["notices"])


def test_sglang_counters(prompts: str, tmp_path: Path) -> None:
    with FakeEndpoint(pattern=[2, 0, 1], kind="sglang") as server:
        bench = measure(ask(prompts, server), tmp_path / "out", QuietUi())
    assert (bench["drafts"], bench["acceptance_length"]) == (12 * 12, 2.0)
    assert bench["engine"]["gauges"] == {"spec_accept_length": 2.0}


def test_a_server_that_is_down_is_one_block(prompts: str, tmp_path: Path) -> None:
    server = FakeEndpoint()
    server.http.server_close()
    with pytest.raises(UserError, match="did not answer"):
        measure(ask(prompts, server), tmp_path / "out", QuietUi())
