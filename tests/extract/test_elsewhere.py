"""Stores on fsspec paths: read by ranges, verified, copied there and back, and what goes wrong on the way."""

import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.errors import UserError
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.elsewhere import copy_store
from draftsmith.extract.states import States
from draftsmith.extract.store import StateStore, StateWriter
from made_states import facts, states_of

FACTS = facts()


def states(n: int) -> States:
    return states_of(8 + n, 4, n)


@pytest.fixture(params=["bf16", "fp8"])
def local(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    with StateWriter(tmp_path / "store", FACTS, make_codec(request.param), shard_bytes=(1 << 20) + 2_000) as w:
        for n in range(5):
            w.add(f"r{n}", states(n))
        w.skip("bad", "NaN or infinite states")
    return tmp_path / "store"


@pytest.fixture
def url(local: Path) -> str:
    where = f"memory://{uuid.uuid4()}/deep/store"
    copy_store(local, where)
    return where


def test_rows_are_the_same_bit_for_bit_and_read_by_ranges(
    local: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = StateStore.open(local), StateStore.open(url)
    assert [e.row_id for e in there.index] == [f"r{n}" for n in range(5)] and there.skipped == here.skipped
    fs, read = fsspec.filesystem("memory"), []
    inner = type(fs).cat_file

    def spy(self, path, start=None, end=None, **kwargs):  # type: ignore[no-untyped-def]
        found = inner(self, path, start=start, end=end, **kwargs)
        read.append(len(found))
        return found

    monkeypatch.setattr(type(fs), "cat_file", spy)
    for name in ("r3", "r0", "r4"):
        a, b = here.read(name), there.read(name)
        assert torch.equal(a.aux, b.aux) and torch.equal(a.token_ids, b.token_ids)
        assert a.final is not None and b.final is not None and a.argmax is not None and b.argmax is not None
        assert torch.equal(a.final, b.final) and torch.equal(a.argmax, b.argmax)
        assert (a.boundary, a.final_start) == (b.boundary, b.final_start)
    row = there.index[4].bytes
    assert sum(sorted(read)[: -len(there.shards)]) < 8 * len(there.shards) + 3 * row  # all but the headers
    assert there.verify() == []


def test_there_and_back_gives_the_same_files(local: Path, url: str, tmp_path: Path) -> None:
    copy_store(url, tmp_path / "back")
    names = sorted(p.name for p in local.iterdir())
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == names
    assert all((tmp_path / "back" / n).read_bytes() == (local / n).read_bytes() for n in names)
    assert copy_store(url, tmp_path / "back")["copied"] == 0


def test_a_copy_cut_off_goes_on_and_another_store_is_not_mixed_in(local: Path, url: str, tmp_path: Path) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/shard-00001.safetensors", b"half")
    fs.rm(f"{root}/shard-00001.json")
    assert len(StateStore.open(url)) < 5
    assert copy_store(local, url)["copied"] == 1
    assert StateStore.open(url).verify() == [] and len(StateStore.open(url)) == 5
    with StateWriter(tmp_path / "other", FACTS.with_(aux_layer_ids=[0, 2, 4]), make_codec("bf16")) as w:
        w.add("x", states(1))
    with pytest.raises(UserError, match="holds another store"):
        copy_store(tmp_path / "other", url)


def test_damage_over_there_is_found(url: str) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    raw = bytearray(fs.cat_file(f"{root}/shard-00000.safetensors"))
    raw[(1 << 20) + 5] ^= 1
    fs.pipe_file(f"{root}/shard-00000.safetensors", bytes(raw))
    assert any("damaged" in p for p in StateStore.open(url).verify())
    fs.pipe_file(f"{root}/shard-00000.safetensors", bytes(raw[:300]))
    with pytest.raises(UserError, match="300 bytes"):
        StateStore.open(url).read("r0")
    fs.rm(f"{root}/shard-00000.safetensors")
    assert any("missing" in p for p in StateStore.open(url).verify())
    with pytest.raises(UserError, match="it is missing"):
        StateStore.open(url).read("r0")


def test_places_that_are_none_are_named() -> None:
    for place, text in (("memory://nowhere/at/all", "cannot be listed|holds no states"), ("nosuch://x/y", "nosuch")):
        with pytest.raises(UserError, match=text):
            StateStore.open(place)


def test_the_commands_take_urls(local: Path, url: str) -> None:
    done = CliRunner().invoke(app, ["states", "verify", url], catch_exceptions=False)
    assert done.exit_code == 0 and "in order" in done.stdout
    again = CliRunner().invoke(app, ["states", "copy", str(local), url], catch_exceptions=False)
    assert again.exit_code == 0 and "0 copied now" in again.stdout
    shown = CliRunner().invoke(app, ["states", "show", url, "--row", "r2", "--json"], catch_exceptions=False)
    assert '"tokens": 10' in shown.stdout
