"""Several ranks share a sequence: together they make the loss and the gradients of one. The ranks are threads here."""

import pytest
import torch
from fused_cases import fused_of
from thread_ranks import Shared, ThreadExchange, together
from tiny_drafters import document, tiny_config, tiny_drafter, tiny_head

from draftsmith.train.batch import join
from draftsmith.train.context import slice_pack
from draftsmith.train.objective import reference_loss, supervision
from draftsmith.train.validate import acceptance, proposals, shared_proposals

# lengths and boundaries of the documents of a pack
PACKS = {
    "one document": [(37, 5)],
    "borders within slices and across them": [(9, 3), (2, 1), (14, 6), (11, 2)],
    "an early document over several slices": [(31, 9), (4, 1)],
    "a last document over several slices": [(3, 1), (29, 2)],
    "one slice without an answer": [(24, 19)],
    "short": [(3, 1)],
}


def pack(lengths, dtype=torch.float64, pad=0):
    parts = [document(n, b, i, dtype=dtype) for i, (n, b) in enumerate(lengths)]
    return join(parts, pad_to=sum(n for n, _ in lengths) + pad)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("name", PACKS)
def test_ranks_make_loss_and_gradients_of_one(name, K, count, multiple=1):
    model = tiny_drafter()
    head, whole = tiny_head(model), pack(PACKS[name], pad=count)
    weights = [0.8**s for s in range(K)]
    one = fused_of(model, head)
    loss, stats = one.loss_and_grads(whole, one.plan(whole, K, multiple=multiple), weights)
    counts = supervision(whole, model.t2d, K).sum(1)

    def work(exchange):
        mine = slice_pack(whole, exchange, K + 1)
        step = fused_of(model, head)
        plan = step.plan(mine, K, multiple=multiple)
        return *step.loss_and_grads(mine, plan, weights, counts), step.flat.grad, plan.counts

    results, shared = together(count, work)
    torch.testing.assert_close(sum(r[3] for r in results), counts.float())
    torch.testing.assert_close(sum(r[0] for r in results), loss, rtol=1e-12, atol=1e-12)
    for field in ("count", "ce", "top1", "entropy"):
        torch.testing.assert_close(sum(getattr(r[1], field) for r in results), getattr(stats, field))
    torch.testing.assert_close(sum(r[2] for r in results), one.flat.grad, rtol=1e-9, atol=1e-12)
    assert set(shared.calls) == {4 if mine_crosses(whole, count) else 0}


def mine_crosses(whole, count):
    chunk = -(-whole.tokens // (2 * count))
    return any(a // chunk != (b - 1) // chunk for a, b in whole.spans)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "norms": {"norm_before_fc": True, "norm_output": True}},
        {"num_key_value_heads": 4, "norms": {"norm_before_residual": True, "fc_norm": True}, "own_embedding": True},
    ],
    ids=["bias and norms", "no grouping, own embedding"],
)
def test_every_switch_of_the_drafter_and_rows_that_are_all_computed(changes):
    model = tiny_drafter(tiny_config(**changes))
    head, whole = tiny_head(model), pack([(17, 3), (12, 2)])
    one = fused_of(model, head)
    loss, _ = one.loss_and_grads(whole, one.plan(whole, 3), [1.0, 0.8, 0.64])
    counts = supervision(whole, model.t2d, 3).sum(1)

    def work(exchange):
        step = fused_of(model, head)
        mine = slice_pack(whole, exchange, 4)
        plan = step.plan(mine, 3, multiple=128)
        assert not plan.compact
        return step.loss_and_grads(mine, plan, [1.0, 0.8, 0.64], counts)[0], step.flat.grad

    results, _ = together(2, work)
    torch.testing.assert_close(results[0][0] + results[1][0], loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(results[0][1] + results[1][1], one.flat.grad, rtol=1e-9, atol=1e-12)


def test_every_row_is_one_ranks_and_costs_are_even():
    whole = pack([(64, 1)])
    seen, costs = [], []
    for rank in range(4):
        mine = slice_pack(whole, ThreadExchange(Shared(4), rank), 3)
        own = mine.context.own("cpu")
        seen += mine.position[own].tolist()
        costs.append(int((mine.position[own] + 1).sum()))
    assert sorted(seen) == list(range(64))
    assert len(set(costs)) == 1


def test_a_second_step_reuses_nothing_of_the_first():
    model = tiny_drafter()
    head, packs = tiny_head(model), [pack([(21, 4)]), pack([(13, 2), (8, 3)])]

    def work(exchange):
        step, out = fused_of(model, head), []
        for whole in packs:
            mine = slice_pack(whole, exchange, 3)
            counts = supervision(whole, model.t2d, 2).sum(1)
            step.loss_and_grads(mine, step.plan(mine, 2, multiple=4), [1.0, 0.8], counts)
            out.append(step.flat.grad.clone())
        return out

    results, _ = together(2, work)
    for i, whole in enumerate(packs):
        one = fused_of(model, head)
        one.loss_and_grads(whole, one.plan(whole, 2), [1.0, 0.8])
        torch.testing.assert_close(results[0][i] + results[1][i], one.flat.grad, rtol=1e-9, atol=1e-12)


MLA = {"q_lora_rank": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("form", [{}, {"form": "mla", "mla": MLA, "num_key_value_heads": 4}], ids=["llama", "mla"])
def test_ranks_make_the_gradients_of_autograd(form, recompute):
    whole = pack([(17, 3), (12, 2)], pad=1)

    def make():
        model = tiny_drafter(tiny_config(**form))
        return model, tiny_head(model)

    one, head = make()
    expected = reference_loss(one, whole, 3, [1.0, 0.8, 0.64], head)[0]
    expected.backward()
    counts = supervision(whole, one.t2d, 3).sum(1)
    models = [make()[0] for _ in range(2)]

    def work(exchange):
        mine = slice_pack(whole, exchange, 4)
        loss = reference_loss(models[exchange.rank], mine, 3, [1.0, 0.8, 0.64], head, counts, recompute)[0]
        loss.backward()
        return loss.detach()

    # autograd's CPU backward runs in the calling thread
    results, _ = together(2, work)
    torch.testing.assert_close(sum(results), expected.detach(), rtol=1e-12, atol=1e-12)
    grads = [dict(m.named_parameters()) for m in models]
    for name, p in one.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(grads[0][name].grad + grads[1][name].grad, p.grad, rtol=1e-9, atol=1e-12)


def test_ranks_share_a_validation():
    model = tiny_drafter()
    batches = [pack([(21, 4), (9, 2)]), pack([(5, 1)])]
    expected = acceptance(model, batches, 3)
    results, shared = together(2, lambda exchange: acceptance(model, batches, 3, exchange))
    assert expected.drafts > 5
    assert [r.as_dict() for r in results] == [expected.as_dict()] * 2
    assert shared.calls[0] > 2 * len(batches)  # keys too, not proposals alone
    for whole in batches:
        proposed = proposals(model, whole, 3)
        found, _ = together(2, lambda exchange, whole=whole: shared_proposals(model, whole, 3, exchange))
        assert all(torch.equal(f, proposed) for f in found)
        assert int((proposed >= 0).sum()) > 0
