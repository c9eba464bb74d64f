"""A disk that fills up in the middle of a write, for every writer of the data road: one clear error, nothing half-written
under a final name, what was finished still verifies, and the same call goes on once there is room.

The operating system itself refuses here (a limit on the size of files, met in mid-write), so that buffers, partial
lines and libraries of their own behave as on a full disk."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from draftsmith.capture.rows import Row, RowWriter, iter_rows, verify_rows
from draftsmith.cli import main as cli
from draftsmith.errors import Exit
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.states import States
from draftsmith.extract.store import StateStore, StateWriter
from draftsmith.record import read_json, write_json
from draftsmith.tensor_file import write_tensors
from made_states import facts, states_of

FACTS = facts(64)


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes: writes stop half-way with an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def states(n: int) -> States:
    return states_of(20, 4, n, hidden=64)


def a_row(i: int, text: str = "answer") -> Row:
    return Row(f"p{i}-0-0", f"p{i}", 0, 0, "s", [5, 6, 7, 8], 2, "stop", "default", 0.7, 1.0, "m", text)


@pytest.mark.parametrize("spare", [300, 5000, 11000])
def test_states_that_meet_a_full_disk_are_kept_up_to_the_last_whole_row(tmp_path: Path, spare: int) -> None:
    room = (1 << 20) + 3 * states(0).tokens * 600 + spare
    with pytest.raises(OSError) as e, files_end_at(room), StateWriter(tmp_path, FACTS, make_codec("bf16")) as w:
        for n in range(40):
            w.add(f"r{n}", states(n))
    assert e.value.errno == 27
    assert not list(tmp_path.glob("shard-*"))  # nothing under its final name
    with StateWriter(tmp_path, FACTS, make_codec("bf16")) as w:
        there = len(w.done)
        assert 0 < there < 40
        for n in range(40):
            if f"r{n}" not in w.done:
                w.add(f"r{n}", states(n))
    store = StateStore.open(tmp_path)
    assert store.verify() == [] and len(store) == 40
    for n in (0, there - 1, there, 39):
        assert torch.equal(store.read(f"r{n}").aux, states(n).aux)


def test_a_row_that_failed_half_way_does_not_move_the_next_one(tmp_path: Path) -> None:
    """A caller that goes on with the same writer after room was made."""
    with StateWriter(tmp_path, FACTS, make_codec("bf16")) as w:
        w.add("r0", states(0))
        with pytest.raises(OSError), files_end_at((1 << 20) + 15_000):
            w.add("r1", states(1))
        w.add("r1", states(1))
        w.add("r2", states(2))
    store = StateStore.open(tmp_path)
    assert store.verify() == [] and len(store) == 3
    assert torch.equal(store.read("r2").aux, states(2).aux)


def test_a_shard_that_cannot_be_finished_is_finished_later(tmp_path: Path) -> None:
    w = StateWriter(tmp_path, FACTS, make_codec("bf16"))
    for n in range(3):
        w.add(f"r{n}", states(n))
    with pytest.raises(OSError), files_end_at(100):
        w.close()
    with StateWriter(tmp_path, FACTS, make_codec("bf16")) as again:
        assert again.done == {"r0", "r1", "r2"}
    assert StateStore.open(tmp_path).verify() == []


def test_rows_of_a_part_that_did_not_fit_are_written_again_whole(tmp_path: Path) -> None:
    w = RowWriter(tmp_path, every_rows=5, every_seconds=float("inf"))
    for i in range(5):
        w.add([a_row(i)])
    with pytest.raises(OSError), files_end_at(400):
        for i in range(5, 10):
            w.add([a_row(i, "x" * 50 + str(i))])
    assert verify_rows(tmp_path) == 5 and not list(tmp_path.glob(".*.part"))
    w.close_part()  # what capture does on its way out: by now there may be room
    assert verify_rows(tmp_path) == 10


def test_a_ledger_line_cut_off_by_a_full_disk_does_not_swallow_the_next(tmp_path: Path) -> None:
    w = RowWriter(tmp_path, every_rows=1, every_seconds=float("inf"))
    w.add([a_row(0)])
    ledger = tmp_path / "ledger.jsonl"
    size = ledger.stat().st_size
    reason = "it was too long " * 400  # a unit given up: the ledger alone grows
    with pytest.raises(OSError), files_end_at(size + 200):
        w.give_up("p1", 0, reason)
    assert ledger.stat().st_size == size
    w.give_up("p2", 0, "other")
    w.add([a_row(3)])
    again = RowWriter(tmp_path)
    assert set(again.settled()) == {("p0", 0), ("p1", 0), ("p2", 0), ("p3", 0)}
    assert [r.prompt_id for r in iter_rows(tmp_path)] == ["p0", "p3"]


def test_tensors_and_records_stay_as_they_were(tmp_path: Path) -> None:
    path, old = tmp_path / "model.safetensors", {"a": torch.ones(4)}
    write_tensors(path, old)
    write_json(tmp_path / "run.json", {"status": "done"})
    before = path.read_bytes()
    with files_end_at(500):
        with pytest.raises(OSError) as e:
            write_tensors(path, {"a": torch.ones(4096)})
        with pytest.raises(OSError):
            write_json(tmp_path / "run.json", {"status": "x" * 5000})
    assert e.value.errno == 27 and str(path) in str(e.value)
    assert path.read_bytes() == before and read_json(tmp_path / "run.json") == {"status": "done"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "run.json"]


def test_the_command_line_says_one_block_and_that_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(_: str) -> object:
        def app(**_: object) -> None:
            with files_end_at(500):
                write_tensors(tmp_path / "x.safetensors", {"a": torch.ones(4096)})

        return app

    monkeypatch.setattr(cli, "build", build)
    monkeypatch.setattr("sys.argv", ["draftsmith", "train", "r.yaml", "--json"])
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == int(Exit.BAD_INPUT)
    said = capsys.readouterr()
    block = json.loads(said.out)
    assert "disk is full" in json.dumps(block) and "goes on from here" in json.dumps(block)
    assert "Traceback" not in said.out + said.err
