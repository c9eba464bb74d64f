"""Stores of states that were copied badly, cut, mixed up or edited: opening, reading and verifying name the fault in a
sentence, never with a traceback, and never give a row that is not the one asked for (H03, H05 and what is like them)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_d_disk_full import FACTS, states

from draftsmith.errors import UserError
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.store import StateStore, StateWriter

SHARD, INDEX = "shard-00000.safetensors", "shard-00000.json"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two shards of rows r0 … r5."""
    with StateWriter(tmp_path, FACTS, make_codec("bf16"), shard_bytes=(1 << 20) + 40_000) as w:
        for n in range(6):
            w.add(f"r{n}", states(n))
    assert (tmp_path / "shard-00001.json").is_file()
    return tmp_path


def edit(path: Path, change: Callable[[dict], object]) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


BROKEN: dict[str, Callable[[Path], object]] = {
    "store.json is cut": lambda f: (f / "store.json").write_text('{"format": 1, "codec"'),
    "store.json is a list": lambda f: (f / "store.json").write_text("[]"),
    "store.json lacks the codec": lambda f: edit(f / "store.json", lambda d: d.pop("codec")),
    "another codec's name": lambda f: edit(f / "store.json", lambda d: d.update(codec="fp4")),
    "a format of the future": lambda f: edit(f / "store.json", lambda d: d.update(format=9)),
    "an index is cut": lambda f: (f / INDEX).write_text((f / INDEX).read_text()[:200]),
    "an index is empty": lambda f: (f / INDEX).write_text(""),
    "an index without rows": lambda f: edit(f / INDEX, lambda d: d.pop("rows")),
    "an index without its checksum": lambda f: edit(f / INDEX, lambda d: d.pop("sha256")),
    "a row with a field too many": lambda f: edit(f / INDEX, lambda d: d["rows"][0].update(colour=1)),
    "a row of another shard": lambda f: edit(f / INDEX, lambda d: d["rows"][0].update(shard="../../secret")),
    "the contract is cut": lambda f: (f / "contract.json").write_text("{"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_record_is_named_when_the_store_is_opened(store: Path, what: str) -> None:
    BROKEN[what](store)
    with pytest.raises(UserError) as e:
        StateStore.open(store)
    assert any(name in str(e.value) for name in ("store.json", INDEX, "contract.json", "format", "codec")), str(e.value)
    assert e.value.fix


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(bytes(raw))


def swap(folder: Path) -> None:
    one, two = folder / SHARD, folder / "shard-00001.safetensors"
    held = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(held)


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / SHARD).unlink(), "missing"),
    "empty": (lambda f: (f / SHARD).write_bytes(b""), "bytes"),
    "cut in the header": (lambda f: cut(f / SHARD, 500), "bytes"),
    "cut in the last row": (lambda f: cut(f / SHARD, (f / SHARD).stat().st_size - 100), "bytes"),
    "a header length that is absurd": (lambda f: flip(f / SHARD, 6), "damaged"),
    "a header that is no JSON": (lambda f: flip(f / SHARD, 8), "damaged"),
    "one bit of one state": (lambda f: flip(f / SHARD, (1 << 20) + 999), "damaged"),
    "two shards under each other's names": (swap, "bytes|damaged"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_shard_is_found_by_verify_and_reading_it_is_refused_or_right(store: Path, what: str) -> None:
    damage, word = DAMAGED[what]
    damage(store)
    opened = StateStore.open(store)
    problems = opened.verify()
    assert problems and any(w in p for p in problems for w in word.split("|")), problems
    assert all(SHARD in p or "shard-00001" in p for p in problems)
    if what not in ("one bit of one state", "two shards under each other's names"):  # only a checksum sees those
        try:
            found = opened.read("r0")
        except UserError as e:
            assert e.fix
        else:
            assert torch.equal(found.aux, states(0).aux)


def test_rows_and_indexes_that_do_not_belong_to_the_shard_are_refused(store: Path) -> None:
    edit(store / INDEX, lambda d: d["rows"][0].update(number=99))
    opened = StateStore.open(store)
    with pytest.raises(UserError, match="row r0 cannot be read"):
        opened.read("r0")
    assert any("r0" in p for p in opened.verify())


def test_one_row_twice_and_a_gap_in_the_numbers_are_named(store: Path) -> None:
    edit(store / "shard-00001.json", lambda d: d["rows"][0].update(row_id="r0"))
    assert any("r0 is stored 2 times" in p for p in StateStore.open(store).verify())
    for suffix in (".json", ".safetensors"):
        (store / f"shard-00001{suffix}").rename(store / f"shard-00003{suffix}")
    edit(store / "shard-00003.json", lambda d: [r.update(shard="shard-00003") for r in d["rows"]])
    assert any("without a gap" in p for p in StateStore.open(store).verify())
