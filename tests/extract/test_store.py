"""The store: what is written is read back, in any order, after any kill, and damage is seen."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.extract import shard
from draftsmith.extract.codecs import FP8, dequantize, make_codec, topk_of_logits
from draftsmith.extract.shard import HEADER_ROOM
from draftsmith.extract.states import States, TopK
from draftsmith.extract.store import StateStore, StateWriter, drop
from draftsmith.record import sha256_file
from made_states import facts, states_of

G, A = 16, 3


def contract(hidden: int = G, aux: int = A) -> Contract:
    return facts(hidden, range(aux), layers=8)


def row(seed: int, hidden: int = G, argmax: bool = True) -> States:
    tokens = 3 + 7 * seed % 27
    return states_of(tokens, max(1, tokens // 2), seed, hidden=hidden, argmax=argmax)


def write(folder: Path, rows: range, **kwargs: int) -> None:
    with StateWriter(folder, contract(), make_codec("bf16"), **kwargs) as w:
        for i in rows:
            if f"r{i}" not in w.done:
                w.add(f"r{i}", row(i))


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def same(a: States, b: States) -> bool:
    return (
        torch.equal(a.token_ids, b.token_ids)
        and torch.equal(a.aux, b.aux)
        and a.final is not None
        and b.final is not None
        and torch.equal(a.final, b.final)
        and (a.argmax is None) == (b.argmax is None)
        and (a.argmax is None or b.argmax is None or torch.equal(a.argmax, b.argmax))
        and (a.boundary, a.final_start) == (b.boundary, b.final_start)
    )


def test_rows_come_back_in_any_order_from_several_shards(tmp_path: Path) -> None:
    write(tmp_path, range(40), shard_bytes=HEADER_ROOM + 20_000)
    store = StateStore.open(tmp_path)
    assert len(store.shards) > 1
    assert [e.row_id for e in store.index] == [f"r{i}" for i in range(40)]
    for i in (39, 0, 17, 3):
        assert same(store.read(f"r{i}"), row(i))
    assert store.read("r1").token_ids.dtype == torch.int64
    assert store.verify() == []


def test_plain_safetensors_reads_a_shard(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write(tmp_path, range(3))
    tensors = load_file(tmp_path / "shard-00000.safetensors")
    assert torch.equal(tensors["1.aux"], row(1).aux)


@pytest.mark.parametrize("hidden", [1, 3, 5, 16])
def test_odd_sizes_stay_aligned(tmp_path: Path, hidden: int) -> None:
    with StateWriter(tmp_path, contract(hidden), make_codec("bf16")) as w:
        for i in range(5):
            w.add(f"r{i}", row(i, hidden, argmax=i % 2 == 0))
    store = StateStore.open(tmp_path)
    assert all(same(store.read(f"r{i}"), row(i, hidden, argmax=i % 2 == 0)) for i in range(5))


def test_a_store_grows_and_knows_its_rows(tmp_path: Path) -> None:
    write(tmp_path, range(5))
    first = (tmp_path / "shard-00000.safetensors").read_bytes()
    write(tmp_path, range(9))
    assert (tmp_path / "shard-00000.safetensors").read_bytes() == first
    assert [e.row_id for e in StateStore.open(tmp_path).index] == [f"r{i}" for i in range(9)]


def test_header_full_closes_the_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.extract.shard.HEADER_ROOM", 4096)
    write(tmp_path, range(40))
    store = StateStore.open(tmp_path)
    assert len(store.shards) > 1 and len(store) == 40 and store.verify() == []


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_until(folder: Path, stop: int) -> int:
    """Write 40 rows in a child that is killed in the middle of row `stop + 1` (-1: between a shard's rename and its
    index; 99: not at all). Returns the child's wait status."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    if stop < 0:
        shard.write_json = die
    with StateWriter(folder, contract(), make_codec("bf16"), shard_bytes=HEADER_ROOM + 20_000) as w:
        for i in range(40):
            if f"r{i}" in w.done:
                continue
            if i == 7:
                w.skip("r7", "nan")
                continue
            w.add(f"r{i}", row(i))
            if i == stop:
                for file, half in ((w._shard._file, b"half a row"), (w._shard._log, '{"entry": {"row')):
                    file.write(half)
                    file.flush()
                die()
    os._exit(0)


def test_killed_anywhere_the_bytes_are_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    assert write_until(tmp_path / "whole", 99) == 0
    for stop in (11, 23, -1):
        assert write_until(tmp_path / "cut", stop) == signal.SIGKILL
    assert write_until(tmp_path / "cut", 99) == 0
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    store = StateStore.open(tmp_path / "cut")
    assert store.skipped == {"r7": "nan"} and len(store) == 39 and store.verify() == []


def test_full_shards_are_summed_together_and_named_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun, fails = threading.Event(), [], [True]

    def first_is_slow(path: Path) -> str:
        begun.append(path.name)
        if path.name == ".shard-00000.part" and fails:
            go.wait(10)
            raise OSError("no such luck")
        return sha256_file(path)

    monkeypatch.setattr(shard, "sha256_file", first_is_slow)
    w = StateWriter(tmp_path / "cut", contract(), make_codec("bf16"), shard_bytes=HEADER_ROOM + 20_000)
    for i in range(40):
        w.add(f"r{i}", row(i))
        if w._next == 3:
            break
    until = time.monotonic() + 5
    while len(begun) < 3 and time.monotonic() < until:
        time.sleep(0.005)
    assert sorted(begun) == [f".shard-0000{i}.part" for i in range(3)]
    assert not list((tmp_path / "cut").glob("shard-*"))
    go.set()
    with pytest.raises(OSError, match="no such luck"):
        w.close()
    assert not list((tmp_path / "cut").glob("shard-*"))  # none may be named without the first
    fails.clear()
    for folder in ("cut", "whole"):
        write(tmp_path / folder, range(40), shard_bytes=HEADER_ROOM + 20_000)
    assert StateStore.open(tmp_path / "cut").verify() == []
    assert [e.row_id for e in StateStore.open(tmp_path / "cut").index] == [f"r{i}" for i in range(40)]
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_lost_shard_takes_the_later_ones_with_it(tmp_path: Path) -> None:
    """Power failed while several were being finished, and the first one's bytes had not reached the disk."""
    child = os.fork()
    if not child:
        shard.sha256_file = lambda path: time.sleep(60) or ""
        w = StateWriter(tmp_path / "cut", contract(), make_codec("bf16"), shard_bytes=HEADER_ROOM + 20_000)
        for i in range(40):
            w.add(f"r{i}", row(i))
            if w._next == 3:
                die()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(list((tmp_path / "cut").glob(".shard-*.journal"))) == 4
    (tmp_path / "cut" / ".shard-00000.part").write_bytes(b"")
    for folder in ("cut", "whole"):
        write(tmp_path / folder, range(40), shard_bytes=HEADER_ROOM + 20_000)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_row_that_the_kill_damaged_is_written_again(tmp_path: Path) -> None:
    w = StateWriter(tmp_path, contract(), make_codec("bf16"))
    for i in range(4):
        w.add(f"r{i}", row(i))
    w._shard.release()
    part = tmp_path / ".shard-00000.part"
    with part.open("r+b") as f:  # the last row's bytes never reached the disk
        f.seek(-8, os.SEEK_END)
        f.write(bytes(8))
    again = StateWriter(tmp_path, contract(), make_codec("bf16"))
    assert "r2" in again.done and "r3" not in again.done
    again.add("r3", row(3))
    again.close()
    assert same(StateStore.open(tmp_path).read("r3"), row(3))


def test_verify_names_what_is_wrong(tmp_path: Path) -> None:
    write(tmp_path, range(40), shard_bytes=HEADER_ROOM + 20_000)
    first, second, third = (tmp_path / f"shard-0000{i}.safetensors" for i in range(3))
    raw = bytearray(first.read_bytes())
    raw[HEADER_ROOM + 100] ^= 1
    first.write_bytes(raw)
    second.unlink()
    third.write_bytes(third.read_bytes()[:-1])
    problems = StateStore.open(tmp_path).verify()
    assert len(problems) == 3
    assert "damaged" in problems[0] and "missing" in problems[1] and "bytes" in problems[2]


def test_another_contract_or_codec_is_refused(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    with pytest.raises(UserError, match=r"aux_layer_ids: \[0, 1, 4\] in this run"):
        StateWriter(tmp_path, contract().with_(aux_layer_ids=[0, 1, 4]), make_codec("bf16"))
    with pytest.raises(UserError, match="codec 'bf16', this run has 'fp8'"):
        StateWriter(tmp_path, contract(), make_codec("fp8"))
    with pytest.raises(UserError, match="holds no states"):
        StateStore.open(tmp_path / "nowhere")


def test_wrong_rows_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    good = row(1)
    with StateWriter(tmp_path, contract(), make_codec("bf16")) as w:
        w.add("a", good)
        for bad in (
            States(good.token_ids[:-1], good.boundary, good.aux, good.final_start, good.final),
            States(good.token_ids, good.boundary, good.aux.transpose(0, 1), good.final_start, good.final),
            States(good.token_ids, good.boundary, good.aux, good.final_start + 1, good.final),
        ):
            with pytest.raises(ValueError, match="want"):
                w.add("b", bad)
        with pytest.raises(ValueError, match="stored already"):
            w.add("a", good)
    assert len(StateStore.open(tmp_path)) == 1


def test_dropped_states_say_so(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    assert drop(tmp_path) > 0
    with pytest.raises(UserError, match="deleted after training"):
        StateStore.open(tmp_path)
    assert json.loads((tmp_path / "shard-00000.json").read_text())["rows"][2]["row_id"] == "r2"


def test_fp8_is_within_its_rounding(tmp_path: Path) -> None:
    with StateWriter(tmp_path, contract(), make_codec("fp8")) as w:
        w.add("r", row(1))
    got, want = StateStore.open(tmp_path).read("r"), row(1)
    assert got.aux.dtype == torch.bfloat16 and want.final is not None and got.final is not None
    for a, b in ((got.aux, want.aux), (got.final, want.final)):
        # e4m3 keeps 3 bits after the point: half a step is 2^-4 of the value; plus bf16's own 2^-9
        limit = b.float().abs() * (2**-4 + 2**-8) + b.float().abs().amax(-1, keepdim=True) * 2**-10 / 448 * 448 / 2
        assert bool(((a.float() - b.float()).abs() <= limit).all())


def test_every_fp8_value_is_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    q = codes[(codes & 0x7F) != 0x7F].view(FP8).reshape(1, -1)  # all but the two NaN
    for scale in (1.0, 0.5, 3.0, 1e-4, 1e4):
        want = (q.float() * scale).bfloat16()
        assert torch.equal(dequantize(q, torch.tensor([scale])), want)


def test_topk_keeps_the_distribution(tmp_path: Path) -> None:
    base = row(1)
    M, D = base.tokens - base.final_start, 70_000
    for d in (50, D):  # wide ids and narrow ones
        logits = torch.randn(M, d, generator=torch.Generator().manual_seed(0)) * 4 + 1000
        topk = topk_of_logits(logits, 40)
        states = States(base.token_ids, base.boundary, base.aux, base.final_start, None, base.argmax, topk)
        folder = tmp_path / str(d)
        with StateWriter(folder, contract(), make_codec("fp8-topk", {"k": 40, "draft_vocab_size": d})) as w:
            w.add("r", states)
        teacher = StateStore.open(folder).read("r").teacher()
        assert isinstance(teacher, TopK)
        assert torch.equal(teacher.ids, topk.ids)
        want = torch.log_softmax(logits, -1).gather(1, topk.ids)
        got = teacher.logits - teacher.log_total().unsqueeze(1)
        assert float((got - want).abs().max()) < 0.02
        rest = 1 - want.exp().sum(-1)
        assert torch.allclose((teacher.rest - teacher.log_total()).exp(), rest, atol=1e-3)


def test_story_bytes_per_token() -> None:
    story = {"tokens": 1, "supervised": 1, "aux_layers": 3, "hidden": 7168}
    assert make_codec("bf16").row_bytes(**story) == 57_344 + 8
    assert make_codec("fp8-topk", {"k": 128, "draft_vocab_size": 32000}).row_bytes(**story) <= 22_500


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_row_bytes_is_what_encode_gives(name: str) -> None:
    codec, s = make_codec(name), row(2)
    got = sum(t.numel() * t.element_size() for t in codec.encode(s).values())
    assert got == codec.row_bytes(s.tokens, s.tokens - s.final_start, A, G)


def test_reading_maps_and_does_not_load(tmp_path: Path) -> None:
    import psutil

    big = 1024
    with StateWriter(tmp_path, contract(big), make_codec("bf16")) as w:
        for i in range(60):
            T = 100
            w.add(
                f"r{i}", States(torch.arange(T), 1, torch.ones(T, A, big).bfloat16(), 0, torch.ones(T, big).bfloat16())
            )
    store = StateStore.open(tmp_path)

    def anonymous() -> int:
        return sum(m.anonymous for m in psutil.Process().memory_maps(grouped=True))

    before = anonymous()
    kept = [store.read(f"r{i}") for i in range(60)]
    assert sum(float(s.aux[0, 0, 0]) for s in kept) == 60
    assert anonymous() - before < 5_000_000 < store.bytes / 8
