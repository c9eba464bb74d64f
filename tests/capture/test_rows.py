"""Rows on disk: parts that never change, a ledger that mends itself, and nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.capture.rows import (
    LEDGER,
    Row,
    RowWriter,
    count_rows,
    iter_rows,
    row_id,
    rows_hash,
    verify_rows,
    write_part,
    write_rows,
)
from draftsmith.errors import UserError


def row(prompt: str, sample: int = 0, turn: int = 0, ids: tuple[int, ...] = (1, 2, 3, 4)) -> Row:
    return Row(
        row_id(prompt, sample, turn), prompt, sample, turn, "set", list(ids), 2, "stop", "default", 0.7, 1.0, "m", "é\n"
    )


def test_rows_come_back_as_they_were_in_their_order(tmp_path: Path) -> None:
    rows = [row(f"p{i}", i % 2, ids=tuple(range(i, i + 5))) for i in range(13)]
    assert write_rows(tmp_path, rows, every_rows=4) == 13
    assert list(iter_rows(tmp_path)) == rows
    assert count_rows(tmp_path) == verify_rows(tmp_path) == 13
    assert len(list(tmp_path.glob("part-*.parquet"))) == 4


def test_a_stage_folder_is_as_good_as_its_rows_folder(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", [row("a")])
    assert [r.prompt_id for r in iter_rows(tmp_path)] == ["a"]
    assert rows_hash(tmp_path) == rows_hash(tmp_path / "rows")


def test_hash_hears_every_row(tmp_path: Path) -> None:
    write_rows(tmp_path / "a", [row("a"), row("b")])
    write_rows(tmp_path / "b", [row("a"), row("b")])
    write_rows(tmp_path / "c", [row("a"), row("b", ids=(1, 2, 3, 5))])
    assert rows_hash(tmp_path / "a") == rows_hash(tmp_path / "b") != rows_hash(tmp_path / "c")


def test_a_kill_between_part_and_ledger_loses_and_doubles_nothing(tmp_path: Path) -> None:
    write_rows(tmp_path, [row("a"), row("b")], every_rows=1)
    write_part(tmp_path / "part-00002.parquet", [row("c")])  # closed, not yet in the ledger
    (tmp_path / ".part-00003.parquet.part").write_bytes(b"half")
    before = {p.name: p.read_bytes() for p in tmp_path.glob("part-*")}
    writer = RowWriter(tmp_path)
    assert sorted(writer.settled()) == [("a", 0), ("b", 0), ("c", 0)]
    writer.add([row("d")])
    writer.close_part()
    assert [r.prompt_id for r in iter_rows(tmp_path)] == ["a", "b", "c", "d"]
    assert not list(tmp_path.glob(".*.part"))
    assert {n: (tmp_path / n).read_bytes() for n in before} == before


def test_a_cut_ledger_line_is_taken_back(tmp_path: Path) -> None:
    write_rows(tmp_path, [row("a"), row("b")], every_rows=1)
    raw = (tmp_path / LEDGER).read_bytes()
    (tmp_path / LEDGER).write_bytes(raw[:-7])
    assert RowWriter(tmp_path).count == 2
    assert (tmp_path / LEDGER).read_bytes() == raw


def test_given_up_units_are_settled_and_counted(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path)
    writer.give_up("x", 0, "empty answer")
    writer.add([row("a")])
    writer.close_part()
    writer.give_up("y", 1, "empty answer")
    writer.close_part()
    again = RowWriter(tmp_path)
    assert again.given_up == {"empty answer": 2}
    assert set(again.settled()) == {("a", 0), ("x", 0), ("y", 1)}
    assert count_rows(tmp_path) == 1


def test_missing_changed_and_absent_rows_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no captured rows"):
        list(iter_rows(tmp_path))
    write_rows(tmp_path, [row("a"), row("b")], every_rows=1)
    (tmp_path / "part-00001.parquet").write_bytes((tmp_path / "part-00000.parquet").read_bytes())
    with pytest.raises(UserError, match="was changed"):
        verify_rows(tmp_path)
    (tmp_path / "part-00001.parquet").unlink()
    with pytest.raises(UserError, match="is missing"):
        RowWriter(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        list(iter_rows(tmp_path))
