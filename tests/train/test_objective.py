"""The objective against a transcription of what the engine does when it drafts, and its invariances."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tiny_drafters import document, tiny_config, tiny_drafter, tiny_head

from draftsmith.drafter.model import rms_norm
from draftsmith.drafter.rope import rotate
from draftsmith.train.batch import join
from draftsmith.train.objective import reference_loss, shift, step_weights, supervision, teacher


def engine_loss(model, doc, K, weights, head):
    """One document, row by row with an explicit key cache: prefill of rows 0…t, then K-1 drafts on top of it."""
    layer, attn, cfg = model.layers[0], model.layers[0].self_attn, model.config
    n, m, d = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    T, sums, counts = doc.tokens, torch.zeros(K, dtype=torch.float64), torch.zeros(K, dtype=torch.int64)

    def project(state, token, position):
        normed = layer.hidden_norm(state)
        x = torch.cat([layer.input_layernorm(model.embed(token[None])[0]), normed])
        cos, sin = attn.rope.angles(position[None], x.dtype)
        q = rotate(attn.q_proj(x).view(1, n, d), cos, sin)[0]
        k = rotate(attn.k_proj(x).view(1, m, d), cos, sin)[0]
        return q, k, attn.v_proj(x).view(m, d), normed if layer.norm_before_residual else state

    def forward(q, cache, residual):
        keys = torch.stack([k for k, _ in cache]).repeat_interleave(n // m, 1)
        values = torch.stack([v for _, v in cache]).repeat_interleave(n // m, 1)
        p = (torch.einsum("nd,tnd->nt", q, keys) * d**-0.5).softmax(-1)
        stream = residual + attn.o_proj(torch.einsum("nt,tnd->nd", p, values).flatten())
        return stream + layer.mlp(layer.post_attention_layernorm(stream))

    fused = model.fuse(doc.aux)
    for t in range(T - 1):
        cache, state = [], fused[t]
        for u in range(t + 1):
            q, k, v, residual = project(fused[u], doc.token_ids[u + 1], doc.position[u])
            cache.append((k, v))
        for s in range(K):
            if t + 2 + s >= T:
                break
            if s:
                q, k, v, residual = project(state, doc.token_ids[t + 1 + s], doc.position[t] + s)
                cache.append((k, v))
            stream = forward(q, cache, residual)
            normed = model.norm(stream)
            state = normed if cfg.norms.norm_output else stream
            if not doc.answer[t + 2 + s] or not model.t2d[doc.argmax[t + 1 + s]] or not doc.final_valid[t + 1 + s]:
                continue
            p = (rms_norm(doc.final[t + 1 + s], head.norm_weight, head.eps) @ head.rows.t()).softmax(-1)
            sums[s] = sums[s] + F.cross_entropy(model.lm_head(normed), p)
            counts[s] += 1
    return sum(weights[s] * sums[s] / counts[s].clamp_min(1) for s in range(K))


@pytest.mark.parametrize(
    "norms",
    [
        {},
        {"norm_before_residual": True},
        {"norm_output": True, "fc_norm": True},
        {"norm_before_fc": True, "norm_before_residual": True},
    ],
)
def test_unrolled_loss_and_gradients_equal_drafting_row_by_row(norms):
    model = tiny_drafter(tiny_config(norms=norms))
    head, doc, K = tiny_head(model), document(9, 3, 5), 3
    weights = step_weights(0.8, K)
    grads = []
    for loss in (reference_loss(model, doc, K, weights, head)[0], engine_loss(model, doc, K, weights, head)):
        model.zero_grad()
        loss.backward()
        grads.append([loss.detach(), *(p.grad.clone() for _, p in model.trained())])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_supervision_is_written_out(drafter, batch):
    mask = supervision(batch, drafter.t2d, 3)
    for s in range(3):
        for t in range(batch.tokens):
            ok = False
            if t + 2 + s < batch.tokens and batch.doc[t] >= 0 and batch.doc[t] == batch.doc[t + 2 + s]:
                choice = batch.argmax[t + 1 + s]
                ok = bool(batch.answer[t + 2 + s] and batch.final_valid[t + 1 + s] and drafter.t2d[choice])
            assert mask[s, t] == ok
    assert mask.any(1).all()
    assert not mask.all(1).any()


def test_unknown_choice_of_the_target_is_not_supervised(drafter, head):
    doc = document(12, 2, 3)
    doc.argmax[5] = -1
    mask = supervision(doc, drafter.t2d, 2)
    assert not mask[0, 4]
    assert not mask[1, 3]


def test_padding_packing_order_and_split_do_not_change_the_loss(drafter, head):
    docs, K = [document(n, b, i) for i, (n, b) in enumerate([(9, 3), (14, 6), (7, 2), (5, 4)])], 3
    weights = step_weights(0.8, K)
    whole = join(docs)
    loss, stats = reference_loss(drafter, whole, K, weights, head)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in drafter.trained()}
    for parts in (
        [join(docs, pad_to=50)],
        [join(docs[::-1])],
        [join(docs[:1], pad_to=20), join(docs[1:])],
        docs,
    ):
        drafter.zero_grad()
        total = sum(reference_loss(drafter, p, K, weights, head, counts=stats.count)[0] for p in parts)
        total.backward()
        torch.testing.assert_close(total, loss, rtol=1e-10, atol=1e-12)
        for name, p in drafter.trained():
            torch.testing.assert_close(p.grad, grads[name], rtol=1e-8, atol=1e-11)


def test_a_teacher_of_all_logits_equals_the_one_made_from_final_states(drafter, head):
    doc, D = document(12, 3, 4), drafter.config.draft_vocab_size
    logits, ids = head.logits(doc.final).sort(-1, descending=True)
    none = torch.full((12,), float("-inf"), dtype=logits.dtype)
    whole = replace(doc, final=None, topk=(ids, logits, none))
    for stored in (whole, join([whole], pad_to=20)):
        a, _ = reference_loss(drafter, doc, 2, [1, 1], head)
        b, _ = reference_loss(drafter, stored, 2, [1, 1], None)
        torch.testing.assert_close(a, b)
    few = replace(whole, topk=(ids[:, :5], logits[:, :5], logits[:, 5:].logsumexp(-1)))
    rows = torch.arange(12)
    p, q = teacher(few, rows, None, D), teacher(whole, rows, None, D)
    torch.testing.assert_close(p.sum(-1), torch.ones(12, dtype=p.dtype))
    torch.testing.assert_close(p.gather(1, ids[:, :5]), q.gather(1, ids[:, :5]))
    rest = p.gather(1, ids[:, 5:])
    torch.testing.assert_close(rest, q.gather(1, ids[:, 5:]).mean(-1, keepdim=True).expand_as(rest))


def test_float64_gradient_of_the_whole_objective(drafter, head, batch):
    """Central differences of every parameter along random directions."""
    K, weights = 3, step_weights(0.8, 3)

    def value():
        return reference_loss(drafter, batch, K, weights, head)[0]

    value().backward()
    gen = torch.Generator().manual_seed(3)
    for name, p in drafter.trained():
        direction = torch.randn(p.shape, generator=gen, dtype=p.dtype)
        eps = 1e-5
        with torch.no_grad():
            p.add_(direction, alpha=eps)
            up = value()
            p.add_(direction, alpha=-2 * eps)
            down = value()
            p.add_(direction, alpha=eps)
        numeric, exact = (up - down) / (2 * eps), (p.grad * direction).sum()
        assert torch.isclose(numeric, exact, rtol=2e-6, atol=1e-8), name


def test_stats_are_sums_over_counted_rows(drafter, head, batch):
    loss, stats = reference_loss(drafter, batch, 2, [1.0, 0.5], head)
    assert stats.count.tolist() == supervision(batch, drafter.t2d, 2).sum(1).tolist()
    expected = stats.ce[0] / stats.count[0] + 0.5 * stats.ce[1] / stats.count[1]
    torch.testing.assert_close(loss.detach(), expected)
    assert (stats.entropy > 0).all()
    assert (stats.ce > stats.entropy).all()
    assert (stats.top1 <= stats.count).all()


def test_shift():
    x = torch.arange(4)
    assert shift(x, 1, -1).tolist() == [1, 2, 3, -1]
    assert shift(x, 9, -1).tolist() == [-1] * 4
