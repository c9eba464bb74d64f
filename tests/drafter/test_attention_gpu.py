"""The GPU form of the unrolled attention (flex attention) against its definition."""

import pytest
import torch

from draftsmith.drafter.attention import attend, attend_plain

SPANS = ((0, 300), (300, 301), (301, 640))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "m", "d"), [(4, 2, 64), (4, 4, 128)])
@pytest.mark.parametrize("steps", [1, 3])
def test_flex_equals_definition_in_values_and_gradients(steps, n, m, d):
    results = []
    for form in (attend, attend_plain):
        gen = torch.Generator("cuda").manual_seed(7)
        made = [
            torch.randn(640, h, d, generator=gen, device="cuda", requires_grad=True) for h in (n, *[m] * (2 * steps))
        ]
        q, *kv = made
        out = form(q, kv[:steps], kv[steps:], SPANS, d**-0.5)
        (out * torch.linspace(-1, 2, out.numel(), device="cuda").view_as(out)).sum().backward()
        results.append([out.detach(), *(x.grad for x in made)])
    for ours, theirs in zip(*results, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 3e-3
