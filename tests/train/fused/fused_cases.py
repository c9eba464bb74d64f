"""The hand-written step beside autograd: same drafter, same batch, both gradients."""

import torch

from draftsmith.train.fused.layout import FlatParams
from draftsmith.train.fused.step import FusedStep
from draftsmith.train.objective import reference_loss, step_weights


def fused_of(model, head, dtype=torch.float64, **options):
    flat = FlatParams(model.config, "cpu", dtype, train_embedding=model.config.own_embedding)
    flat.load(dict(model.named_parameters()))
    return FusedStep(flat, head, model.lent_embedding, model.t2d, **options)


def autograd(model, head, batch, K, weights=None, counts=None):
    model.zero_grad()
    weights = weights or step_weights(0.8, K)
    loss, stats = reference_loss(model, batch, K, weights, head, counts)
    loss.backward()
    return loss.detach(), stats, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(step, loss, stats, expected, tolerance=1e-9):
    ref_loss, ref_stats, ref_grads = expected
    torch.testing.assert_close(loss.double(), ref_loss.double(), rtol=tolerance, atol=tolerance)
    for name in ("count", "ce", "top1", "entropy"):
        ours, theirs = getattr(stats, name).double(), getattr(ref_stats, name).double()
        torch.testing.assert_close(ours, theirs, rtol=max(tolerance, 1e-6), atol=max(tolerance, 1e-6))
    assert set(ref_grads) == set(step.flat.grads)
    for name, grad in ref_grads.items():
        ours = step.flat.grads[name].double()
        error = (ours - grad.double()).norm() / grad.double().norm().clamp_min(1e-12)
        assert error < tolerance * 10, f"{name}: relative error {error:.2e}"
