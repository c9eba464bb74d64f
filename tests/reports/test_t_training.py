"""Public reports about training (T01, T03-T06): each would be seen here."""

import pytest
import torch
from fake_states import fake_store
from tiny_drafters import document, tiny_drafter, tiny_head

from draftsmith.train.batch import StepBatch, join
from draftsmith.train.objective import TargetHead, reference_loss, shift, supervision, teacher


@pytest.fixture
def drafter():
    return tiny_drafter()


@pytest.fixture
def head(drafter):
    return tiny_head(drafter)


def five_tokens(drafter):
    """Prompt of two tokens, answer of three; every choice of the target can be drafted."""
    doc = document(5, 2, 0)
    doc.argmax[:] = drafter.t2d.nonzero()[0, 0]
    return doc


def test_t01_the_mask_moves_with_the_targets(drafter, head):
    """SpecForge#885: the mask was not shifted with inputs and targets, so the second answer token was never learned and
    one position of the prompt was. Row t predicts token t + 2 (step 0): rows 0, 1, 2 learn the answer tokens 2, 3, 4."""
    mask = supervision(five_tokens(drafter), drafter.t2d, 2)
    assert mask[0].tolist() == [True, True, True, False, False]
    assert mask[1].tolist() == [True, True, False, False, False]  # step 1 predicts token t + 3


def test_t01_gradient_reaches_just_the_rows_that_predict_answers(drafter, head):
    doc = five_tokens(drafter)
    seen = {}
    drafter.norm.register_forward_hook(lambda m, args, out: (out.retain_grad(), seen.update(out=out))[0])
    reference_loss(drafter, doc, 1, [1.0], head)[0].backward()
    rows = seen["out"].grad.abs().sum(1) > 0
    assert rows.tolist() == [True, True, True, False, False]


def test_t03_cross_entropy_is_taken_in_float32(drafter):
    """speculators#788: a bfloat16 softmax makes gradient errors of 3 % and more where the drafter is nearly right."""
    gen = torch.Generator().manual_seed(0)
    final = torch.randn(6, 16, generator=gen) * 4
    exact = TargetHead(torch.ones(16), 1e-5, torch.randn(24, 16, generator=gen))
    low = exact.to("cpu", torch.bfloat16)
    logits = low.logits(final.bfloat16())
    assert logits.dtype == torch.float32
    doc = document(6, 1, 0, dtype=torch.float32)
    p = teacher(StepBatch(**{**doc.__dict__, "final": final.bfloat16()}), torch.arange(6), low, 24)
    assert p.dtype == torch.float32
    torch.testing.assert_close(p.sum(-1), torch.ones(6), rtol=1e-6, atol=1e-6)
    model = tiny_drafter(dtype=torch.float32).bfloat16()
    batch = join([document(9, 2, 1)]).to("cpu", torch.bfloat16)
    loss, stats = reference_loss(model, batch, 2, [1.0, 1.0], tiny_head(model, torch.bfloat16))
    assert loss.dtype == stats.ce.dtype == torch.float32


def test_t04_the_next_step_takes_the_datas_token_and_the_drafters_own_state(drafter, head):
    """speculators#818: which token feeds the next unrolled step? The data's; the state is the drafter's own."""
    doc = document(9, 3, 2)
    tokens, states = [], []
    embed, step = drafter.embed, drafter.step

    def spy_embed(ids):
        tokens.append(ids.clone())
        return embed(ids)

    def spy_step(state, *rest):
        states.append(state)
        out = step(state, *rest)
        states.append(out[1])
        return out

    drafter.embed, drafter.step = spy_embed, spy_step
    reference_loss(drafter, doc, 3, [1.0] * 3, head)
    for s, ids in enumerate(tokens):
        assert torch.equal(ids, shift(doc.token_ids, s + 1, 0))
    assert states[2] is states[1] and states[4] is states[3]


def test_t05_a_batch_without_a_row_to_learn_from_is_no_nan(drafter, head):
    """0/0 over a fully masked batch made the loss, and every weight after it, NaN."""
    doc = document(8, 2, 0)
    doc.answer[:] = False
    loss, stats = reference_loss(drafter, doc, 3, [1.0] * 3, head)
    assert float(loss) == 0.0
    assert stats.count.tolist() == [0, 0, 0]


def test_t06_validation_leaves_the_model_in_training_mode(drafter):
    """SpecForge#563: eval() was never undone."""
    from draftsmith.train.data import read_pack
    from draftsmith.train.validate import acceptance

    model, store = tiny_drafter(dtype=torch.float32), fake_store(2)
    batch = read_pack(store, [e.row_id for e in store.index], 64, None, torch.float32, pad=False)
    model.train()
    acceptance(model, [batch], 2)
    assert model.training


@pytest.mark.parametrize("at", [3])
def test_t06_optimizer_state_and_rate_are_restored(at, tmp_path):
    """SpecForge#563: the optimizer state was not restored; the learning rate jumped on resume. (The bit-for-bit test
    is tests/train/test_loop.py.)"""
    import json

    from test_loop import killed_after, training

    killed_after(training(tmp_path / "a"), at)
    training(tmp_path / "a").run()
    training(tmp_path / "b").run()
    rates = [
        [json.loads(x)["lr"] for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines() if '"lr"' in x]
        for n in ("a", "b")
    ]
    assert rates[0] == rates[1]
    assert (tmp_path / "a/best/model.safetensors").read_bytes() == (tmp_path / "b/best/model.safetensors").read_bytes()
