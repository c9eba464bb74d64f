"""Order, splits and packing of training rows."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from fake_states import FakeStore, fake_store, states
from tiny_drafters import G

from draftsmith.errors import UserError
from draftsmith.train.data import (
    Order,
    channel_rms,
    pack_order,
    read_ahead,
    read_pack,
    require_answers,
    split_rows,
)


def entries(lengths, boundary=2):
    return [SimpleNamespace(row_id=f"r{i}", tokens=n, boundary=boundary) for i, n in enumerate(lengths)]


def test_split_keeps_prompts_together_and_does_not_depend_on_order():
    rows = entries([10] * 200)

    def prompt(row_id):
        return str(int(row_id[1:]) // 4)

    split = split_rows(rows, 0.1, prompt)
    held = {e.row_id for e in split.held_out}
    assert len(held) == 20
    assert {prompt(i) for i in held}.isdisjoint({prompt(e.row_id) for e in split.train})
    assert len(split.train) + len(held) == 200
    again = split_rows(rows[::-1], 0.1, prompt)
    assert {e.row_id for e in again.held_out} == held


def test_split_has_something_on_both_sides_or_says_so():
    split = split_rows(entries([5, 5]), 0.01)
    assert len(split.train) == len(split.held_out) == 1
    split = split_rows(entries([5, 5]), 0.99)
    assert len(split.train) == len(split.held_out) == 1
    with pytest.raises(UserError, match="1 prompt"):
        split_rows(entries([5, 5]), 0.1, lambda _: "same")


def test_every_row_is_in_exactly_one_pack_of_an_epoch_and_packs_are_full():
    gen = torch.Generator().manual_seed(0)
    rows = entries(torch.randint(20, 300, (400,), generator=gen).tolist())
    sizes = {e.row_id: e.tokens for e in rows}
    packs = pack_order(rows, 1000, 7, 0)
    assert sorted(r for p in packs for r in p) == sorted(sizes)
    fill = [sum(sizes[r] for r in p) for p in packs]
    assert max(fill) <= 1000
    assert sum(fill) / len(fill) > 930
    assert pack_order(rows, 1000, 7, 0) == packs
    assert pack_order(rows, 1000, 7, 1) != packs
    assert pack_order(rows, 1000, 8, 0) != packs


def test_a_row_longer_than_a_pack_fills_one_alone_and_is_cut():
    store = FakeStore({"long": states(50, 3, 1), "short": states(9, 2, 2)})
    assert sorted(pack_order(store.index, 20, 0, 0)) == [["long"], ["short"]]
    batch = read_pack(store, ["long"], 20, None, torch.float32, pad=False)
    assert batch.tokens == 20
    assert batch.spans == ((0, 20),)


def test_order_counts_steps_and_epochs():
    rows = entries([10] * 30)
    one = len(pack_order(rows, 50, 0, 0))
    assert Order.of_run(rows, 50, 0, None, 3.0).total == 3 * one
    assert Order.of_run(rows, 50, 0, None, 0.5).total == round(one / 2)
    order = Order.of_run(rows, 50, 0, 20, 1.0, ranks=2)
    assert order.total == 40
    assert [order.pack(i) for i in range(one)] == pack_order(rows, 50, 0, 0)
    assert order.pack(one + 1) == pack_order(rows, 50, 0, 1)[1]


def test_two_threads_that_ask_at_once_get_the_same_epochs(monkeypatch):
    """A stream looks ahead of the trainer's reader: what one makes the other must not make again as the next epoch."""
    made = []

    def slow(*args):
        time.sleep(0.02)  # the other thread gets its turn
        made.append(args[3])
        return pack_order(*args)

    monkeypatch.setattr("draftsmith.train.data.pack_order", slow)
    order = Order.of_run(entries([10] * 30), 50, 0, None, 5.0)
    order._epochs.clear()
    made.clear()
    with ThreadPoolExecutor(4) as pool:
        found = [list(pool.map(order.pack, range(order.total))) for _ in range(2)]
    assert found[0] == found[1] == [p for epoch in range(5) for p in pack_order(order.rows, 50, 0, epoch)]
    assert made == [0, 1, 2, 3, 4]


def test_a_pack_holds_what_the_store_holds():
    store = FakeStore({"a": states(12, 5, 1), "b": states(7, 1, 2)})
    scale = torch.rand(3 * G) + 0.5
    batch = read_pack(store, ["a", "b"], 32, scale, torch.float32, pad=True)
    assert batch.tokens == 32
    assert batch.spans == ((0, 12), (12, 19))
    assert batch.doc.tolist() == [0] * 12 + [1] * 7 + [-1] * 13
    assert batch.position.tolist()[:19] == [*range(12), *range(7)]
    assert batch.answer.tolist()[:19] == [False] * 5 + [True] * 7 + [False] + [True] * 6
    assert batch.final_valid.tolist()[:19] == [False] * 4 + [True] * 8 + [True] * 7
    torch.testing.assert_close(batch.aux[:12], store.rows["a"].aux.flatten(1).float() * scale)
    torch.testing.assert_close(batch.final[4:12], store.rows["a"].final.float())
    assert batch.argmax[4:12].tolist() == store.rows["a"].argmax.tolist()
    assert batch.argmax[:4].tolist() == [-1] * 4
    assert not batch.answer[19:].any()


def test_channel_rms():
    store = fake_store(6)
    found = channel_rms(store, store.index)
    every = torch.cat([s.aux.flatten(1).float() for s in store.rows.values()])
    torch.testing.assert_close(found, every.square().mean(0).sqrt())
    for s in store.rows.values():
        s.aux[:, 0, 3] = 0
    assert channel_rms(store, store.index)[3] == 1


@pytest.mark.parametrize(("boundary", "word"), [(0, "as if the target had written"), (10, "no token at all")])
def test_a_mask_of_all_ones_or_all_zeros_is_refused(boundary, word):
    with pytest.raises(UserError, match="boundary") as e:
        require_answers(entries([10, 10], boundary))
    assert word in e.value.why


def test_nan_states_are_refused_by_name():
    store = fake_store(3)
    store.rows["row-1"].aux[2, 1, 0] = float("nan")
    with pytest.raises(UserError, match="row row-1: aux"):
        read_pack(store, ["row-0", "row-1"], 64, None, torch.float32, pad=False)
    with pytest.raises(UserError, match="row row-1: aux"):
        channel_rms(store, store.index)


def test_states_without_the_targets_choice_are_refused():
    store = fake_store(1)
    store.rows["row-0"].argmax = None
    with pytest.raises(UserError, match="argmax"):
        read_pack(store, ["row-0"], 64, None, torch.float32, pad=False)


def test_read_ahead_keeps_the_order():
    assert list(read_ahead(lambda n: n * n, range(5))) == [(n, n * n) for n in range(5)]
    assert list(read_ahead(lambda n: n, [])) == []
