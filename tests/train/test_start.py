"""Going on from an existing drafter: map, rows, refusals and the proof that nothing was lost."""

import pytest
import torch
from fake_states import contract, fake_store
from test_loop import section, training
from tiny_drafters import D, V, tiny_config, tiny_drafter, tiny_head

from draftsmith.dialects import vllm
from draftsmith.dialects.checkpoint import Checkpoint
from draftsmith.errors import UserError
from draftsmith.recipe import DrafterSection
from draftsmith.train.start import drafter_from, moved_head, read_start


@pytest.fixture
def model():
    return tiny_drafter(dtype=torch.float32)


@pytest.fixture
def folder(model, tmp_path):
    place = tmp_path / "made-eagle3"
    vllm.write(Checkpoint(model.config, dict(model.state_dict())), place, dtype="float32")
    return place


def other_vocab(model, keep):
    """The model's draft vocab with all but `keep` tokens exchanged."""
    old = (torch.arange(D) + model.d2t).tolist()
    new = sorted(old[:keep] + [t for t in range(V) if t not in old][: D - keep])
    ids = torch.tensor(new)
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(len(ids)), t2d, ids


def test_same_vocab_is_kept_bit_for_bit(model, folder):
    found = read_start(folder, contract(), DrafterSection())
    again, notes = drafter_from(found, model.d2t, model.t2d, tiny_head(model, torch.float32), model.lent_embedding)
    for name, t in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], t), name
    assert any("kept" in n for n in notes)


def test_rows_move_with_their_tokens_and_new_ones_come_from_the_target(model, folder):
    found = read_start(folder, contract(), DrafterSection())
    head = tiny_head(model, torch.float32)
    d2t, t2d, ids = other_vocab(model, keep=10)
    rows, said = moved_head(found, d2t, head)
    assert "10 lm_head rows moved, 14 new ones" in said and "14 dropped" in said
    old = {int(t): i for i, t in enumerate(torch.arange(D) + model.d2t)}
    kept = [i for i, t in enumerate(ids.tolist()) if t in old]
    for i in kept:
        assert torch.equal(rows[i], model.lm_head.weight[old[int(ids[i])]])
    new = [i for i in range(D) if i not in kept]
    cosine = torch.cosine_similarity(rows[new], (head.rows * head.norm_weight)[new])
    torch.testing.assert_close(cosine, torch.ones_like(cosine))
    lengths = rows.norm(dim=1)
    assert lengths[new].mean() == pytest.approx(float(lengths[kept].mean()), rel=0.3)
    again, _ = drafter_from(found, d2t, t2d, head, model.lent_embedding)
    assert torch.equal(again.t2d, t2d)


def test_what_does_not_fit_is_refused(folder):
    facts = contract()
    with pytest.raises(UserError, match="aux layers"):
        read_start(folder, facts.with_(aux_layer_ids=[1, 2, 4]), DrafterSection())
    with pytest.raises(UserError, match=r"drafter\.head_dim"):
        read_start(folder, facts, DrafterSection(head_dim=8))
    wider = facts.target.model_copy(update={"vocab_size": V + 8})
    with pytest.raises(UserError, match="vocabulary"):
        read_start(folder, facts.model_copy(update={"target": wider}), DrafterSection())


def test_an_own_table_equal_to_the_targets_is_shared_and_another_kept_frozen(tmp_path):
    model = tiny_drafter(tiny_config(own_embedding=True), dtype=torch.float32)
    point = Checkpoint(model.config, dict(model.state_dict()))
    head, table = tiny_head(model, torch.float32), model.embed_tokens.weight.detach().clone()
    shared, _ = drafter_from(point, model.d2t, model.t2d, head, table)
    assert shared.embed_tokens is None and not shared.config.own_embedding
    kept, _ = drafter_from(point, model.d2t, model.t2d, head, table + 1)
    assert torch.equal(kept.embed_tokens.weight, table)
    assert not any("embed" in n for n, _ in kept.trained())


def test_acceptance_is_measured_before_the_first_step_and_the_start_can_win(tmp_path):
    store = fake_store()
    run = training(tmp_path, section(steps=4, lr=10.0, clip=1e9), store=store, measure_start=True)
    run.ui.notes.clear()
    figures = run.run()
    first = [x for x in run.ui.notes if "before the first step" in x]
    assert len(first) == 1
    assert figures["start_acceptance_length"] >= 1.0
    assert figures["acceptance_length"] >= figures["start_acceptance_length"]
    metrics = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert '"step": 0' in metrics[0] and "acceptance_length" in metrics[0]
