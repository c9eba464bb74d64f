"""The draft vocabulary: chosen by what the target writes, never without the ends of turns, the same every time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.errors import UserError
from draftsmith.target.tokenizer import TargetTokenizer
from draftsmith.vocab.choose import Forced, choose, count_answers, coverage, forced_tokens, is_held_out
from draftsmith.vocab.map import VocabMap

NONE = Forced([], [])


def counts_of(**seen: int) -> np.ndarray:
    out = np.zeros(40, np.int64)
    for name, n in seen.items():
        out[int(name[1:])] = n
    return out


def test_the_map_holds_offsets_in_ascending_order() -> None:
    made = VocabMap.from_ids([7, 2, 30], 40)
    assert made.d2t.tolist() == [2, 6, 28]
    assert made.draft_to_target().tolist() == [2, 7, 30]
    back = made.target_to_draft()
    assert [back[2], back[7], back[30], back[3]] == [0, 1, 2, -1]
    assert (made.draft_size, made.vocab_size, made.t2d.sum()) == (3, 40, 3)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 39), min_size=1))
def test_any_set_of_ids_makes_a_sound_map(ids: set[int]) -> None:
    made = VocabMap.from_ids(ids, 40)
    assert made.faults() == []
    assert np.array_equal(np.flatnonzero(made.target_to_draft() >= 0), np.flatnonzero(made.t2d))


def test_saved_and_loaded_it_is_the_same_and_unsound_ones_are_refused(tmp_path: Path) -> None:
    made = VocabMap.from_ids([1, 5, 9], 40)
    made.save(tmp_path)
    assert VocabMap.load(tmp_path).hash() == made.hash()
    assert made.hash() != VocabMap.from_ids([1, 5, 8], 40).hash()
    VocabMap(np.array([5, 5, 50], np.int64), made.t2d).save(tmp_path)
    with pytest.raises(UserError, match="leaves the vocabulary"):
        VocabMap.load(tmp_path)
    VocabMap(made.d2t.astype(np.int32), made.t2d).save(tmp_path)
    with pytest.raises(UserError, match="int32"):
        VocabMap.load(tmp_path)
    (tmp_path / "vocab.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="cannot be read"):
        VocabMap.load(tmp_path)
    with pytest.raises(UserError, match="is missing"):
        VocabMap.load(tmp_path / "none")


def test_the_most_written_tokens_win_and_ties_go_to_the_lower_id() -> None:
    choice = choose(counts_of(t9=5, t3=2, t4=2, t8=2), 3, NONE)
    assert choice.map.draft_to_target().tolist() == [3, 4, 9]
    assert choice.coverage == pytest.approx(9 / 11)
    assert choice.filler == 0


def test_ends_of_turns_are_in_even_if_never_seen() -> None:
    choice = choose(counts_of(t9=5, t3=2, t4=1), 4, Forced([39, 20], []))
    assert choice.map.draft_to_target().tolist() == [3, 9, 20, 39]


def test_free_slots_go_to_specials_then_in_id_order_and_are_counted() -> None:
    choice = choose(counts_of(t9=5), 8, Forced([2], [30, 31, 32, 33]))
    assert choice.map.draft_to_target().tolist() == [0, 1, 2, 9, 30, 31, 32, 33]
    assert choice.filler == 4
    assert choice.coverage == 1.0


def test_unseen_specials_do_not_crowd_out_what_is_written() -> None:
    counts = np.arange(40, dtype=np.int64)
    counts[:20] = 0
    choice = choose(counts, 20, Forced([39], list(range(20))))
    assert choice.left_out == 15
    assert choice.map.t2d[25:].all()


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match="has 40"):
        choose(counts_of(t1=1), 41, NONE)
    with pytest.raises(UserError, match="must be in"):
        choose(counts_of(t1=1), 2, Forced([1, 2, 3], []))
    full = choose(counts_of(t1=1), 40, NONE)
    assert full.map.d2t.tolist() == [0] * 40


def test_counting_splits_by_prompt_and_refuses_foreign_ids() -> None:
    rows = [(f"{i:016x}", [i % 7, 9]) for i in range(400)]
    heard, held = count_answers(rows, 40)
    assert int((heard + held).sum()) == 800
    assert int(held.sum()) == 2 * sum(is_held_out(p) for p, _ in rows)
    assert 10 < held.sum() / 2 < 80
    assert coverage(heard, np.arange(40) == 9) == pytest.approx(0.5)
    with pytest.raises(UserError, match="token id 40"):
        count_answers([("a", [40])], 40)


def test_forced_tokens_of_a_target(byte_tokenizer: Callable[..., Path]) -> None:
    folder = byte_tokenizer()
    tok = TargetTokenizer.load(folder)
    forced = forced_tokens(folder, tok, ["Z"])
    assert {0, 1, 2, 3, 4} <= set(forced.must) | set(forced.specials)
    assert {2, 0, 3, 4, *tok.encode("Z")} <= set(forced.must)
    without = forced_tokens(folder, None, [])
    assert {0, 1, 2, 3, 4} == set(without.must) | set(without.specials)
    with pytest.raises(UserError, match=r"vocab\.force"):
        forced_tokens(folder, None, ["Z"])


def test_a_list_of_eos_ids_is_taken_whole(byte_tokenizer: Callable[..., Path]) -> None:
    folder = byte_tokenizer()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 300, 301]}))
    assert {2, 300, 301} <= set(forced_tokens(folder, None, []).must)
