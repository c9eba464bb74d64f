"""The hand-written step against autograd in float64, for every switch of the drafter."""

from dataclasses import replace

import pytest
import torch
from fused_cases import assert_same, autograd, fused_of
from tiny_drafters import document, tiny_config, tiny_drafter, tiny_head

from draftsmith.train.batch import join

CASES = {
    "plain": {},
    "norm_before_residual": {"norms": {"norm_before_residual": True}},
    "norm_before_fc": {"norms": {"norm_before_fc": True}},
    "fc_norm": {"norms": {"fc_norm": True}},
    "both fc norms": {"norms": {"fc_norm": True, "norm_before_fc": True}},
    "norm_output": {"norms": {"norm_output": True}},
    "every norm": {"norms": dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output"), True)},
    "bias": {"attention_bias": True},
    "no grouping": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "linear rope": {"rope": {"rope_theta": 100.0, "rope_type": "linear", "factor": 2.0}},
    "yarn": {
        "rope": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    },
    "part of the head rotated": {"rope": {"rope_theta": 1e4, "partial_rotary_factor": 0.7}},
    "own embedding": {"own_embedding": True},
    "other width": {"own_embedding": True, "hidden_size": 20},
}  # fmt: skip


def packed(config):
    return join([document(9, 3, 0, config), document(2, 1, 1, config), document(14, 6, 2, config)], pad_to=28)


@pytest.mark.parametrize("multiple", [1, 128], ids=["active rows only", "all rows"])
@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_autograd(case, K, multiple):
    model = tiny_drafter(tiny_config(**CASES[case]))
    head, batch = tiny_head(model), packed(model.config)
    step = fused_of(model, head)
    plan = step.plan(batch, K, multiple=multiple)
    assert plan.compact == (multiple == 1)
    loss, stats = step.loss_and_grads(batch, plan, [0.8**s for s in range(K)])
    assert_same(step, loss, stats, autograd(model, head, batch, K))


def test_second_batch_reuses_memory_and_forgets_the_first(drafter, head, batch):
    step = fused_of(drafter, head)
    for seed in (5, 6, 7):
        other = join([document(12, 4, seed), document(11, 2, seed + 10)])
        loss, stats = step.loss_and_grads(other, step.plan(other, 3, multiple=4), [1.0, 0.8, 0.64])
        assert_same(step, loss, stats, autograd(drafter, head, other, 3))
    assert step.arena.block.numel() >= step.arena.peak > 0


def test_accumulates_over_parts_of_a_step():
    model = tiny_drafter(tiny_config(norms={"fc_norm": True}, attention_bias=True, own_embedding=True))
    head = tiny_head(model)
    parts = [packed(model.config), document(17, 2, 9, model.config)]
    step = fused_of(model, head)
    plans = [step.plan(p, 3) for p in parts]
    counts = plans[0].counts + plans[1].counts
    total = sum(
        step.loss_and_grads(p, plan, [1.0, 0.8, 0.64], counts, accumulate=i > 0)[0]
        for i, (p, plan) in enumerate(zip(parts, plans, strict=True))
    )
    whole = join(parts)
    expected = autograd(model, head, whole, 3)
    stats = step.loss_and_grads(whole, step.plan(whole, 3), [1.0, 0.8, 0.64])[1]
    accumulated = {n: g.clone() for n, g in step.flat.grads.items()}
    assert_same(step, total, stats, expected)
    for name, grad in accumulated.items():
        torch.testing.assert_close(grad, expected[2][name], rtol=1e-8, atol=1e-10)


def test_chunks_do_not_change_the_result(drafter, head, batch):
    expected = autograd(drafter, head, batch, 3)
    step = fused_of(drafter, head, chunk_bytes=7 * 24 * 8)
    loss, stats = step.loss_and_grads(batch, step.plan(batch, 3, multiple=1), [1.0, 0.8, 0.64])
    assert_same(step, loss, stats, expected)


def test_stored_top_k_teacher(drafter, batch):
    gen = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(24, generator=gen)[:9] for _ in range(batch.tokens)])
    logits = torch.randn(ids.shape, generator=gen, dtype=torch.float64)
    rest = torch.randn(batch.tokens, generator=gen, dtype=torch.float64)
    stored = replace(batch, final=None, topk=(ids, logits, rest))
    step = fused_of(drafter, None)
    loss, stats = step.loss_and_grads(stored, step.plan(stored, 3, multiple=1), [1.0, 0.8, 0.64])
    assert_same(step, loss, stats, autograd(drafter, None, stored, 3))


def test_target_bias_scale_and_softcap(drafter, head, batch):
    head = type(head)(head.norm_weight, head.eps, head.rows, torch.randn(24, dtype=torch.float64), 0.5, 3.0)
    step = fused_of(drafter, head)
    loss, stats = step.loss_and_grads(batch, step.plan(batch, 2), [1.0, 0.8])
    assert_same(step, loss, stats, autograd(drafter, head, batch, 2))


def test_only_rows_that_count_are_computed(drafter, head):
    batch = join([document(40, 30, 0), document(24, 23, 1)])
    plan = fused_of(drafter, head).plan(batch, 3, multiple=1)
    assert batch.tokens > 2 * plan.R
    assert len(plan.slot) == int(plan.counts.sum())


def test_float32_agrees():
    model = tiny_drafter(dtype=torch.float32)
    head, batch = tiny_head(model, torch.float32), packed(model.config).to("cpu", torch.float32)
    step = fused_of(model, head, torch.float32)
    loss, stats = step.loss_and_grads(batch, step.plan(batch, 3), [1.0, 0.8, 0.64])
    assert_same(step, loss, stats, autograd(model, head, batch, 3), tolerance=1e-5)


def test_bound_module_shares_weights_and_gradients(drafter, head, batch):
    step = fused_of(drafter, head)
    step.flat.bind(drafter)
    step.loss_and_grads(batch, step.plan(batch, 2), [1.0, 0.8])
    assert drafter.fc.weight.grad.data_ptr() == step.flat.grads["fc.weight"].data_ptr()
    step.flat.param.add_(1.0)
    assert torch.equal(drafter.lm_head.weight, step.flat.named["lm_head.weight"])
