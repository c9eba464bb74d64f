"""What capture tells the keeper of states (extract/one_pass.py): which attempts became rows, and when it must wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from capture_support import as_target, make_run, write_prompts
from stub_server import StubServer

from draftsmith.capture.rows import Row, iter_rows
from draftsmith.capture.run import Servers, capture_rows
from draftsmith.capture.stage import plan_of, settings_of, tokenizer_of
from draftsmith.errors import UserError


class FakeKeeper:
    """Counts attempts. `slow`: looks for which it is behind, after the first settled rows."""

    def __init__(self, slow: int = 0) -> None:
        self.open: set[str] = set()
        self.kept: dict[str, str] = {}
        self.asked, self.slow = 0, slow
        self.fault: UserError | None = None

    def ask(self) -> tuple[str, dict[str, Any]]:
        self.asked += 1
        name = f"s{self.asked}"
        self.open.add(name)
        return name, {"vllm_xargs": {"draftsmith_states": name}}

    def keep(self, row: Row, name: str) -> None:
        self.kept[row.row_id] = name

    def drop(self, name: str) -> None:
        self.open.remove(name)  # KeyError: dropped twice, or never asked for

    def crowded(self) -> bool:
        return True

    def behind(self) -> bool:
        if self.fault is not None:
            raise self.fault
        self.slow -= 1
        return bool(self.kept) and self.slow > 0

    def settled(self, rows: Sequence[Row]) -> None:
        assert all(r.row_id in self.kept for r in rows)


@pytest.fixture
def target(byte_tokenizer: Callable[..., Path]) -> Path:
    return as_target(byte_tokenizer("target"))


def run_capture(out: Path, target: Path, keeper: FakeKeeper, records: list[Any], change: Any, **section: Any) -> Any:
    prompts = write_prompts(out / "p.jsonl", records)
    with StubServer(target, change) as server:
        run = make_run(out, target, [str(prompts)], [server.url], **section)
        folder = run.stage_dir("capture") / "rows"
        servers = Servers([server.url], limit=2, backoff=0.01)
        settings = settings_of(run.recipe.capture)
        tokenizer = tokenizer_of(run, target)
        result = capture_rows(plan_of(run), folder, settings, servers, tokenizer, run.ui, keeper=keeper)
        return result, list(iter_rows(folder))


def test_every_attempt_that_became_no_row_is_dropped(tmp_path: Path, target: Path) -> None:
    """Answers that are not believed and asked for again, empty ones, refused ones: only the rows' own names are left."""
    seen: set[str] = set()

    def change(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        text, choice = body["messages"][0]["content"], reply["choices"][0]
        if text == "empty":
            choice["message"]["content"], choice["token_ids"] = None, choice["token_ids"][-1:]
            reply["usage"]["completion_tokens"] = 1
        elif text == "never" or (text.startswith("once") and text not in seen):
            seen.add(text)
            reply["usage"]["completion_tokens"] += 1
        return reply

    keeper = FakeKeeper()
    records = ["a", "empty", "once 1", "b", "never", "once 2", "c"]
    result, rows = run_capture(tmp_path, target, keeper, records, change)
    assert len(rows) == result["rows"] == 5 and len(result["answers_given_up"]) == 2
    assert keeper.asked > 5 + 2 + 2
    assert keeper.open == set(keeper.kept.values()) and len(keeper.open) == 5
    assert set(keeper.kept) == {r.row_id for r in rows}


def test_capture_waits_for_storing_and_then_goes_on(tmp_path: Path, target: Path) -> None:
    keeper = FakeKeeper(slow=12)
    _, rows = run_capture(tmp_path, target, keeper, [f"n{i}" for i in range(8)], None)
    assert len(rows) == 8 and keeper.slow <= 0


def test_a_fault_in_storing_stops_capture_while_it_waits(tmp_path: Path, target: Path) -> None:
    keeper = FakeKeeper()

    def fail(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        keeper.fault = UserError("the disk is full", "", "")
        return reply

    with pytest.raises(UserError, match="disk is full"):
        run_capture(tmp_path, target, keeper, [f"n{i}" for i in range(40)], fail)
    assert keeper.asked < 10
