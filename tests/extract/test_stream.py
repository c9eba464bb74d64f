"""The stream of states: order, exactly once, both back-pressures, engines that die, and the two buffers."""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import made_states
from draftsmith.errors import UserError
from draftsmith.extract.buffer import FileRing, MemoryBuffer
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.engines import ATTEMPTS, Engine
from draftsmith.extract.feed import Feed, FeedFigures
from draftsmith.extract.rows import Item
from draftsmith.extract.store import StateStore, StateWriter
from draftsmith.extract.streamed import StreamedStates
from draftsmith.ui import QuietUi
from made_states import G, facts

A = 3
FACTS = facts(layers=6)


def some_items(count, low=6, high=30):
    rng = np.random.default_rng(0)
    lengths = rng.integers(low, high, count)
    return [Item(f"r{i}", rng.integers(0, 99, n).astype(np.int32), 4) for i, n in enumerate(lengths)]


def states_of(item):
    """What any engine says of a row: a function of its tokens alone."""
    made = made_states.states_of(item.tokens, 4, int(item.token_ids.sum()) + 1000 * item.tokens)
    return replace(made, token_ids=torch.as_tensor(item.token_ids).long())


def packs_of(items, size=3):
    return [items[i : i + size] for i in range(0, len(items), size)]


class FakeBackend:
    """deaths: numbers of calls (over all generations) at which the engine is gone; slow: seconds a call takes."""

    name = "fake"

    def __init__(self, log, deaths=(), slow=0.0, refuses=None):
        self.log, self.deaths, self.slow, self.refuses, self.dead = log, deaths, slow, refuses, False

    def compute(self, batch):
        self.log["calls"] += 1
        if self.log["calls"] in self.deaths:
            self.dead = True
        if self.slow:
            time.sleep(self.slow)
        if self.dead or any(i.row_id == self.refuses for i in batch):
            raise UserError("the engine died", "", "")
        return [states_of(i) for i in batch]


def engine(name="engine", starts=99, lanes=1, **kind):
    log = {"calls": 0, "started": 0, "closed": 0}

    @contextmanager
    def start():
        if log["started"] >= starts:
            raise UserError("no device is left for another engine", "", "")
        log["started"] += 1
        yield FakeBackend(log, **kind)
        log["closed"] += 1

    made = Engine(start, 64, QuietUi(), name, lanes)
    return made, log


def same(got, item, codec=None):
    want = states_of(item)
    if codec is not None:
        want = codec.decode(codec.encode(want), want.boundary, want.final_start)
    assert torch.equal(got.token_ids, want.token_ids) and torch.equal(got.aux, want.aux)
    assert torch.equal(got.final, want.final) and torch.equal(got.argmax, want.argmax)


def memory(codec="bf16"):
    return MemoryBuffer(make_codec(codec), A, G)


def check_all(feed, packs):
    got = list(feed)
    assert [[i.row_id for i in p] for p, _ in got] == [[i.row_id for i in p] for p in packs]
    for pack, states in got:
        for item, s in zip(pack, states, strict=True):
            same(s, item)


@pytest.mark.parametrize("lanes", [1, 2])
def test_engines_that_die_lose_and_double_nothing(lanes):
    packs = packs_of(some_items(60))
    made = [engine(f"e{n}", lanes=lanes, deaths=(2, 5 + n, 11), slow=0.001 * n) for n in range(3)]
    feed = Feed([e for e, _ in made], packs, memory(), 10**9, FeedFigures())
    check_all(feed, packs)
    feed.close()
    for e, log in made:
        e.close()
        assert log["started"] == log["closed"] <= e.replaced + 1
    assert sum(e.replaced for e, _ in made) >= 3


def test_an_engine_that_cannot_be_had_again_leaves_its_pack_to_the_others():
    packs = packs_of(some_items(30))
    bad, log = engine("bad", starts=1, deaths=(2,))
    good, _ = engine("good", slow=0.002)
    feed = Feed([bad, good], packs, memory(), 10**9, FeedFigures())
    check_all(feed, packs)
    assert log["started"] == 1 and bad.replaced == 1


def test_where_no_engine_is_left_the_trainer_is_told_why():
    made, _ = engine("only", starts=1, deaths=(3,))
    feed = Feed([made], packs_of(some_items(30)), memory(), 10**9, FeedFigures())
    with pytest.raises(UserError, match="no device is left"):
        list(feed)
    feed.close()


def test_a_row_that_no_engine_can_take_ends_the_stream_after_some_attempts():
    made, log = engine(refuses="r7")
    feed = Feed([made], packs_of(some_items(30)), memory(), 10**9, FeedFigures())
    got = []
    with pytest.raises(UserError, match="died"):
        for pack, _ in feed:
            got += [i.row_id for i in pack]
    assert got == [f"r{i}" for i in range(6)] and log["started"] == ATTEMPTS
    feed.close()


@pytest.mark.parametrize("kind", ["memory", "ring"])
def test_engines_wait_for_the_trainer_and_nothing_grows(tmp_path, kind):
    items = some_items(90, 20, 21)
    packs, figures = packs_of(items), FeedFigures()
    codec = make_codec("bf16")
    pack = codec.row_bytes(20, 17, A, G) * 3
    limit = 4 * pack
    buffer = memory() if kind == "memory" else FileRing(tmp_path / "ring", codec, A, G, limit)
    made, log = engine(lanes=2)
    feed = Feed([made], packs, buffer, limit, figures)
    deadline = time.monotonic() + 5
    while log["calls"] < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # nobody reads: no further pack may be made
    assert log["calls"] == 4 and figures.held == limit
    most = 0
    for _pack, _states in feed:
        if kind == "ring":
            most = max(most, len(list(buffer.folder.iterdir())))
    assert figures.peak <= limit and figures.packs == len(packs) and figures.blocked > 0.1
    assert most <= 4
    feed.close()
    assert kind == "memory" or not buffer.folder.exists()


def test_the_trainer_waits_for_the_engines():
    figures = FeedFigures()
    feed = Feed([engine(slow=0.05)[0]], packs_of(some_items(9)), memory(), 10**9, figures)
    assert len(list(feed)) == 3 and figures.starved > 0.1


def test_a_pack_larger_than_the_bound_is_let_through_alone():
    figures = FeedFigures()
    packs = packs_of(some_items(12))
    feed = Feed([engine(lanes=2)[0]], packs, memory(), 1, figures)
    check_all(feed, packs)


def test_closing_in_the_middle_ends_the_threads():
    feed = Feed([engine(slow=0.01)[0]], packs_of(some_items(60)), memory(), 2000, FeedFigures())
    next(iter(feed))
    feed.close()
    assert not [t for t in threading.enumerate() if t in feed._threads]


@pytest.mark.parametrize("codec", ["bf16", "fp8"])
def test_both_buffers_give_what_a_store_would(tmp_path, codec):
    kind = make_codec(codec)
    items = some_items(6)
    with StateWriter(tmp_path / "store", FACTS, kind) as w:
        for i in items:
            w.add(i.row_id, states_of(i))
    store = StateStore.open(tmp_path / "store")
    for buffer in (MemoryBuffer(kind, A, G), FileRing(tmp_path / "ring", kind, A, G, 10**6)):
        buffer.put(0, [states_of(i) for i in items])
        for item, got in zip(items, buffer.take(0), strict=True):
            want = store.read(item.row_id)
            assert torch.equal(got.aux, want.aux) and torch.equal(got.final, want.final)
            assert (got.boundary, got.final_start) == (want.boundary, want.final_start)
            same(got, item, kind)
    assert list((tmp_path / "ring").iterdir()) == []


def test_a_full_disk_under_the_ring_is_one_clear_block(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"the ring of files may hold"):
        FileRing(tmp_path / "a", make_codec("bf16"), A, G, 10**18)
    ring = FileRing(tmp_path / "b", make_codec("bf16"), A, G, 1000)

    def full(tensors, path, *_):
        from pathlib import Path

        Path(path).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    feed = Feed([engine()[0]], packs_of(some_items(6)), ring, 10**9, FeedFigures())
    with pytest.raises(UserError, match=r"cannot be written.*No space left"):
        list(feed)
    assert not list(ring.folder.iterdir())
    feed.close()


def test_an_unfinished_ring_of_an_earlier_start_is_emptied(tmp_path):
    (tmp_path / "ring").mkdir()
    (tmp_path / "ring/pack-0.safetensors").write_bytes(b"torn")
    ring = FileRing(tmp_path / "ring", make_codec("bf16"), A, G, 1000)
    assert not list(ring.folder.iterdir())


# the source that the trainer reads


def source(tmp_path, items, **kind):
    made, log = engine(**kind)

    def open_feed(packs):
        return Feed([made], packs, memory(), 10**6, FeedFigures())

    return StreamedStates(items, FACTS, make_codec("bf16"), open_feed, tmp_path / "kept", 64, made.close), log


def test_a_stream_reads_like_a_store_in_the_order_announced(tmp_path):
    items = some_items(20)
    names = [i.row_id for i in items]
    with source(tmp_path, items, deaths=(4,))[0] as stream:
        assert [e.row_id for e in stream.index] == names and len(stream) == 20
        assert [e.tokens for e in stream.index] == [i.tokens for i in items]
        for name, s in stream.read_many(names[:7]):  # nothing is announced: made now
            same(s, items[names.index(name)])
        order = [["r3", "r9"], ["r1"], ["r3", "r2", "r8"]]  # a row may come again
        stream.expect(order)
        for pack in order:
            got = dict(stream.read_many(pack))
            assert list(got) == pack
            for name in pack:
                same(got[name], items[int(name[1:])])


def test_another_order_than_the_announced_one_is_refused(tmp_path):
    items = some_items(6)
    with source(tmp_path, items)[0] as stream:
        stream.expect([["r1"], ["r2"]])
        with pytest.raises(ValueError, match="the next pack is r1"):
            list(stream.read_many(["r2"]))


def test_kept_rows_are_made_once_and_do_not_disturb_the_order(tmp_path):
    items = some_items(10)
    stream, log = source(tmp_path, items)
    with stream:
        stream.keep(["r8", "r9"])
        made = log["calls"]
        stream.expect([["r0"], ["r1"]])
        next(stream.read_many(["r0"]))
        for name, s in stream.read_many(["r9", "r8"]):
            same(s, items[int(name[1:])])
        next(stream.read_many(["r1"]))
    again, log = source(tmp_path, items)
    with again:
        again.keep(["r8", "r9"])
        assert log["calls"] == 0 and made >= 1
        same(again.read("r8"), items[8])


def test_held_out_rows_without_finite_states_are_left_out_and_all_of_them_stop(tmp_path, monkeypatch):
    items = some_items(4)
    real = states_of

    def broken(item):
        s = real(item)
        if item.row_id in bad:
            s.aux[0, 0, 0] = float("nan")
        return s

    monkeypatch.setitem(FakeBackend.compute.__globals__, "states_of", broken)
    bad = {"r1"}
    with source(tmp_path, items)[0] as stream:
        stream.keep(["r1", "r2"])
        assert stream.kept_ids == {"r2"}
    bad = {"r1", "r2"}
    with source(tmp_path / "b", items)[0] as stream, pytest.raises(UserError, match="no held-out row"):
        stream.keep(["r1", "r2"])
