"""The lean attention over unrolled steps equals its written-out definition, values and gradients."""

import pytest
import torch
from torch.autograd import gradcheck

from draftsmith.drafter.attention import attend, attend_plain

SPANS = ((0, 5), (5, 6), (6, 13))


def inputs(steps, n=4, m=2, d=6, e=6, T=15, dtype=torch.float64):
    gen = torch.Generator().manual_seed(7)
    q = torch.randn(T, n, d, generator=gen, dtype=dtype)
    ks = [torch.randn(T, m, d, generator=gen, dtype=dtype) for _ in range(steps)]
    vs = [torch.randn(T, m, e, generator=gen, dtype=dtype) for _ in range(steps)]
    return [x.requires_grad_() for x in (q, *ks, *vs)]


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize(("n", "m", "d", "e"), [(4, 2, 6, 6), (3, 3, 6, 4), (6, 1, 4, 4)])
def test_lean_equals_definition_in_values_and_gradients(steps, n, m, d, e):
    results = []
    for form in (attend, attend_plain):
        q, *kv = inputs(steps, n, m, d, e)
        out = form(q, kv[:steps], kv[steps:], SPANS, d**-0.5)
        (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append([out, *(x.grad for x in (q, *kv))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_float64_gradients_are_right():
    q, *kv = inputs(3)
    assert gradcheck(lambda q, *kv: attend(q, kv[:3], kv[3:], SPANS, 0.4), (q, *kv))


def test_rows_outside_documents_give_zeros():
    for steps in (1, 2):
        q, *kv = inputs(steps)
        out = attend(q, kv[:steps], kv[steps:], SPANS[:2], 0.4)
        assert out[:6].abs().min() > 0
        assert out[6:].abs().max() == 0


def test_a_document_does_not_see_its_neighbours():
    q, *kv = inputs(2)
    whole = attend(q, kv[:2], kv[2:], SPANS, 0.4)
    alone = attend(q[6:13], [k[6:13] for k in kv[:2]], [v[6:13] for v in kv[2:]], ((0, 7),), 0.4)
    torch.testing.assert_close(whole[6:13], alone)
