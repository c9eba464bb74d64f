"""The simulated walk against drafting token by token, and its counts."""

import pytest
import torch
from fake_states import FakeStore, states
from tiny_drafters import tiny_config, tiny_drafter

from draftsmith.train.data import read_pack
from draftsmith.train.validate import (
    Acceptance,
    acceptance,
    agreement,
    proposals,
    unigram_acceptance,
    walk,
)


def test_walk_jumps_behind_what_was_accepted():
    # rows:        0  1  2  3  4  5  6  7  8  9
    accepted = [9, 2, 9, 9, 0, 1, 9, 3, 0, 0]
    found = walk(accepted, boundary=2, tokens=10, K=3)
    # starts at row 1 (2 accepted), row 4 (0), row 5 (1), row 7: only one token is left to accept before the last
    assert found.drafts == 4
    assert found.accepted == [3, 1, 0]
    assert found.tokens == 8
    assert found.tokens_per_target_step == 8 / 4
    assert found.length == 2.0
    assert found.conditional == [3 / 4, 1 / 3, 0.0]


def test_the_last_draft_counts_past_the_end_as_the_engine_does():
    accepted = [0, 3, 0, 0, 0, 3, 0, 0]
    cut = walk(accepted, boundary=2, tokens=8, K=3)
    whole = walk(accepted, boundary=2, tokens=8, K=3, past=3)
    assert (cut.drafts, cut.accepted, cut.tokens) == (2, [2, 1, 1], 6)
    assert (whole.drafts, whole.accepted, whole.tokens) == (2, [2, 2, 2], 6)


def test_walk_over_a_text_of_one_token_drafts_nothing():
    assert walk([0] * 5, boundary=4, tokens=5, K=2).drafts == 0
    assert walk([0] * 5, boundary=5, tokens=5, K=2).tokens == 0


def engine_walk(model, batch, K):
    """One document: prefill to row t, draft K tokens greedily feeding its own tokens, compare, jump."""
    T = batch.tokens
    boundary = int(batch.answer.nonzero()[0])
    found = Acceptance([0] * K, tokens=T - boundary)
    t = boundary - 1
    while t + 1 < T - 1:
        from draftsmith.drafter.model import Steps

        steps = Steps(spans=((0, t + 1),))
        ids = batch.token_ids[1 : t + 2]
        state = model.fuse(batch.aux[: t + 1])
        n = 0
        for s in range(K):
            normed, state = model.step(state, model.embed(ids), batch.position[: t + 1] + s, steps)
            token = model.draft_to_target(model.lm_head(normed[-1:]).argmax(-1))
            if t + 1 + s >= T - 1 or token != batch.argmax[t + 1 + s]:
                break
            n += 1
            ids = token.expand(t + 1)
        found.drafts += 1
        for i in range(n):
            found.accepted[i] += 1
        t += n + 1
    return found


@pytest.mark.parametrize("seed", range(4))
def test_simulated_walk_equals_drafting_token_by_token(seed):
    config = tiny_config(vocab_size=6, draft_vocab_size=4, num_attention_heads=2, num_key_value_heads=1)
    model = tiny_drafter(config, dtype=torch.float32, seed=seed)
    gen = torch.Generator().manual_seed(seed)
    row = states(40, 6, seed, config)
    # a greedy text: every token is the target's choice after the one before it
    row.argmax = torch.randint(6, row.argmax.shape, generator=gen)
    row.token_ids[row.final_start + 1 :] = row.argmax[:-1]
    # let the drafter be right often: make the target follow its own proposals where they exist
    batch = read_pack(FakeStore({"a": row}), ["a"], 64, None, torch.float32, pad=False)
    for _ in range(6):
        first = proposals(model, batch, 1)[0]
        for t in range(row.boundary - 1, 38):
            if torch.rand((), generator=gen) < 0.8:
                batch.argmax[t + 1] = first[t]
        batch.token_ids[row.boundary :] = batch.argmax[row.boundary - 1 : -1]
    ours, theirs = acceptance(model, [batch], 3), engine_walk(model, batch, 3)
    assert ours.accepted[0] >= 3
    assert (ours.drafts, ours.accepted, ours.tokens) == (theirs.drafts, theirs.accepted, theirs.tokens)


def test_documents_of_a_pack_are_walked_apart():
    model = tiny_drafter(dtype=torch.float32)
    store = FakeStore({f"r{i}": states(20, 4, i) for i in range(3)})
    apart = Acceptance([0, 0])
    for i in range(3):
        apart += acceptance(model, [read_pack(store, [f"r{i}"], 64, None, torch.float32, pad=False)], 2)
    together = acceptance(model, [read_pack(store, ["r0", "r1", "r2"], 64, None, torch.float32, pad=True)], 2)
    assert (apart.drafts, apart.accepted, apart.tokens) == (together.drafts, together.accepted, together.tokens)


def test_a_choice_outside_the_draft_vocab_is_a_miss():
    model = tiny_drafter(dtype=torch.float32)
    batch = read_pack(FakeStore({"a": states(20, 4, 1)}), ["a"], 64, None, torch.float32, pad=False)
    proposed = proposals(model, batch, 2)
    answer_rows = proposed[0] >= 0
    assert model.t2d[proposed[0][answer_rows]].all()
    batch.argmax[:] = (~model.t2d).nonzero()[0, 0]
    assert agreement(batch, proposed).sum() == 0


def test_unigram_acceptance_counts_the_most_frequent_draft_token():
    batch = read_pack(FakeStore({"a": states(20, 4, 1)}), ["a"], 64, None, torch.float32, pad=False)
    t2d = torch.ones(40, dtype=torch.bool)
    t2d[3] = False
    batch.argmax[3:11] = 3
    batch.argmax[11:16] = 7
    batch.argmax[16:] = 9
    assert unigram_acceptance([batch], t2d) == 5 / 16
