"""States kept while answers are given: stored once their rows are closed, adopted by the extract stage."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from extract_support import make_run, some_rows

from draftsmith.capture.rows import RowWriter
from draftsmith.errors import UserError
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.one_pass import FOLDER, Keeper, require_possible
from draftsmith.extract.stage import STAGE, settle_contract
from draftsmith.extract.states import States
from draftsmith.extract.store import StateStore, StateWriter
from draftsmith.extract.transformers_backend import TransformersStates
from draftsmith.stage import execute


class FakeWire:
    """Hands out the states of a row as the engine would: the last one is missing and the one before stands in."""

    layers = (1, 3, 5, 6)

    def __init__(self, model: TransformersStates) -> None:
        self.model, self.asked, self.taken = model, 0, 0
        self.swept: set[str] = set()
        """Names that were wanted when files were last swept."""

    def ask(self, boundary: int | None) -> tuple[str, dict[str, Any]]:
        self.asked += 1
        return f"s{self.asked}", {"vllm_xargs": {}}

    def sweep(self, wanted: set[str]) -> int:
        self.swept = set(wanted)
        return 0

    def take(self, name: str, token_ids: list[int], boundary: int, alive: Any) -> States:
        self.taken += 1
        (s,) = self.model.states([token_ids], [boundary])
        assert s.final is not None and s.argmax is not None
        s.aux[-1], s.final[-1], s.argmax[-1] = s.aux[-2].clone(), s.final[-2].clone(), -1
        return s


@pytest.fixture
def wire(tiny_target: Path) -> FakeWire:
    return FakeWire(TransformersStates(tiny_target, [1, 3, 5]))


def opened(run: Any, wire: FakeWire, max_length: int) -> tuple[StateWriter, Keeper]:
    writer = StateWriter(run.stage_dir("capture") / FOLDER, settle_contract(run), make_codec("bf16"))
    return writer, Keeper(wire, writer, lambda: None, max_length)  # type: ignore[arg-type]


def keep(run: Any, wire: FakeWire, rows: list[Any], close: int) -> Keeper:
    """Answer all rows, of which the first `close` are closed on disk."""
    writer, keeper = opened(run, wire, run.recipe.extract.max_length)
    for row in rows:
        name, _ = keeper.ask()
        keeper.keep(row, name)
    keeper.settled(rows[:close])
    keeper.close()
    writer.close()
    return keeper


def test_only_rows_that_are_closed_get_their_states(tmp_path: Path, tiny_target: Path, wire: FakeWire) -> None:
    rows = some_rows(8)
    run = make_run(tmp_path, tiny_target, rows, passes=1)
    keep(run, wire, rows, close=5)
    store = StateStore.open(tmp_path / "capture" / FOLDER)
    assert [e.row_id for e in store.index] == [r.row_id for r in rows[:5]] and wire.taken == 5


def test_a_part_that_closes_settles_its_rows(tmp_path: Path) -> None:
    closed: list[str] = []
    writer = RowWriter(tmp_path, every_rows=3)
    writer.on_close = lambda rows: closed.extend(r.row_id for r in rows)
    for row in some_rows(4):
        writer.add([row])
    assert len(closed) == 3
    writer.close_part()
    assert len(closed) == 4


def test_extract_adopts_what_was_kept_and_computes_the_rest(tmp_path: Path, tiny_target: Path, wire: FakeWire) -> None:
    rows = some_rows(10)
    run = make_run(tmp_path, tiny_target, rows, passes=1)
    keep(run, wire, rows, close=6)
    kept = {e.row_id for e in StateStore.open(tmp_path / "capture" / FOLDER).index}
    result = execute(STAGE, run)["result"]
    store = StateStore.open(tmp_path / "extract")
    assert {e.row_id for e in store.index} == {r.row_id for r in rows} and store.verify() == []
    assert store.shards == ["shard-00000", "shard-00001"]
    assert {e.row_id for e in store.index if e.shard == "shard-00000"} == kept
    assert result["self_check"]["problems"] == [] and result["self_check"]["final_agreement"] == 1.0
    assert not (tmp_path / "capture" / FOLDER / "store.json").exists()


def test_nothing_is_computed_where_all_was_kept(
    tmp_path: Path, tiny_target: Path, wire: FakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = some_rows(5)
    run = make_run(tmp_path, tiny_target, rows, passes=1)
    keep(run, wire, rows, close=5)
    monkeypatch.setattr("draftsmith.extract.source.TransformersBackend.stream", lambda *a: pytest.fail("a second pass"))
    assert execute(STAGE, run)["result"]["self_check"]["problems"] == []
    s, row = StateStore.open(tmp_path / "extract").read(rows[0].row_id), rows[0]
    assert s.token_ids.tolist() == row.token_ids and torch.equal(s.aux[-1], s.aux[-2])


def test_kept_states_of_other_layers_are_made_anew(tmp_path: Path, tiny_target: Path, wire: FakeWire) -> None:
    rows = some_rows(4)
    keep(make_run(tmp_path, tiny_target, rows, passes=1), wire, rows, close=4)
    other = make_run(tmp_path, tiny_target, rows, passes=1, aux_layers=[0, 2, 4])
    execute(STAGE, other)
    assert StateStore.open(tmp_path / "extract").contract.aux_layer_ids == [0, 2, 4]
    assert any("made anew" in n for n in other.ui.notes)


def test_wrong_kept_states_stop_at_the_self_check(tmp_path: Path, tiny_target: Path) -> None:
    rows = some_rows(4)
    run = make_run(tmp_path, tiny_target, rows, passes=1)
    keep(run, FakeWire(TransformersStates(tiny_target, [0, 2, 4])), rows, close=4)
    with pytest.raises(UserError, match=r"aux id 1 .* it is the stream entering layer 0"):
        execute(STAGE, run)


def test_a_fault_in_storing_stops_capture(tmp_path: Path, tiny_target: Path, wire: FakeWire) -> None:
    rows = some_rows(3)
    run = make_run(tmp_path, tiny_target, rows, passes=1)

    def broken(*a: Any) -> States:
        raise UserError("the engine computed other tokens", "", "")

    wire.take = broken  # type: ignore[method-assign]
    with pytest.raises(UserError, match="other tokens"):
        keep(run, wire, rows, close=3)


def test_files_of_what_becomes_no_row_are_not_wanted(
    tmp_path: Path, tiny_target: Path, wire: FakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.extract.one_pass.SWEEP", 0.01)
    rows = some_rows(6)
    rows[0] = replace(rows[0], token_ids=rows[0].token_ids * 200)
    run = make_run(tmp_path, tiny_target, rows, passes=1)
    writer, keeper = opened(run, wire, 200)
    names = [keeper.ask()[0] for _ in range(8)]
    for row, name in zip(rows, names, strict=False):
        keeper.keep(row, name)  # the first is too long
    keeper.drop(names[6])  # given up; the last is still under way
    keeper.settled(rows[:3])
    expected = {*names[3:6], names[7]}
    end = time.monotonic() + 30
    while wire.swept != expected and time.monotonic() < end:
        time.sleep(0.01)
    assert wire.swept == expected
    keeper.close()
    writer.close()
    assert [e.row_id for e in StateStore.open(tmp_path / "capture" / FOLDER).index] == [r.row_id for r in rows[1:3]]


def test_a_folder_that_cannot_be_looked_into_stops_capture(
    tmp_path: Path, tiny_target: Path, wire: FakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.extract.one_pass.SWEEP", 0.01)
    run = make_run(tmp_path, tiny_target, some_rows(2), passes=1)

    def broken(wanted: set[str]) -> int:
        raise OSError("Stale file handle")

    wire.sweep = broken  # type: ignore[method-assign]
    writer, keeper = opened(run, wire, 200)
    with writer:
        time.sleep(0.1)
        with pytest.raises(OSError, match="Stale"):
            keeper.behind()
        with pytest.raises(OSError, match="Stale"):
            keeper.close()


def test_storing_that_is_behind_says_so_until_it_is_done(
    tmp_path: Path, tiny_target: Path, wire: FakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = some_rows(4)
    run = make_run(tmp_path, tiny_target, rows, passes=1)
    writer, keeper = opened(run, wire, 10_000)
    most = sum(len(r.token_ids) for r in rows[:3]) * keeper._bytes_per_token
    monkeypatch.setattr("draftsmith.extract.one_pass.BEHIND_BYTES", most)
    put, go = writer.put, threading.Event()

    def slow(row: Any) -> None:
        go.wait(30)
        put(row)

    monkeypatch.setattr(writer, "put", slow)
    for row in rows:
        keeper.keep(row, keeper.ask()[0])
    keeper.settled(rows[:3])
    assert not keeper.behind()
    keeper.settled(rows[3:])
    assert keeper.behind()
    go.set()
    end = time.monotonic() + 30
    while keeper.behind() and time.monotonic() < end:
        time.sleep(0.01)
    assert not keeper.behind()
    keeper.close()
    assert keeper._unstored == 0
    keeper._error = UserError("a full disk", "", "")
    with pytest.raises(UserError, match="full disk"):
        keeper.behind()
    writer.close()


@pytest.mark.parametrize(
    ("section", "words"), [({"codec": "fp8-topk"}, "codec is fp8-topk"), ({}, "endpoints names servers")]
)
def test_what_one_pass_cannot_do_is_said(
    tmp_path: Path, tiny_target: Path, section: dict[str, Any], words: str
) -> None:
    run = make_run(tmp_path, tiny_target, some_rows(2), passes=1, **section)
    if not section:
        run.recipe.capture.endpoints.append("http://x")
    with pytest.raises(UserError, match=words):
        require_possible(run)
