"""Run by test_fused_kernels.py in a process of its own: Triton's interpreter is chosen when Triton is imported.

The whole step and the optimizer, once with the Triton kernels and once in plain torch, on the same inputs.
"""

import torch
from fused_cases import fused_of
from test_fused_step import CASES, packed
from tiny_drafters import document, tiny_config, tiny_drafter, tiny_head

from draftsmith.train.batch import join
from draftsmith.train.fused import ops_torch, ops_triton
from draftsmith.train.fused.adamw import FusedAdamW, update_plain
from draftsmith.train.fused.head import FullTeacher
from draftsmith.train.fused.layout import FlatParams
from draftsmith.train.fused.triton_adamw import update


def compare_steps(case, K, multiple, dtype, tolerance, full=False):
    model = tiny_drafter(tiny_config(**CASES[case]), dtype=dtype)
    head, batch = tiny_head(model, dtype), packed(model.config).to("cpu", dtype)
    results = []
    for ops in (ops_torch, ops_triton):
        step = fused_of(model, head, dtype)
        if full:
            ids = model.t2d.nonzero()[:, 0]
            lm_head = torch.randn(40, 16, generator=torch.Generator().manual_seed(5)).to(dtype)
            step.full = FullTeacher(lm_head, ids, step.draft_index.int(), block=16)
        step.ops = ops
        loss, stats = step.loss_and_grads(batch, step.plan(batch, K, multiple=multiple), [0.8**s for s in range(K)])
        results.append((loss, stats, {n: g.clone() for n, g in step.flat.grads.items()}))
    (loss, stats, grads), (loss2, stats2, grads2) = results
    torch.testing.assert_close(loss2, loss, rtol=tolerance, atol=tolerance)
    for name in ("ce", "entropy"):
        torch.testing.assert_close(getattr(stats2, name), getattr(stats, name), rtol=tolerance, atol=tolerance)
    if dtype == torch.float32:
        assert torch.equal(stats2.top1, stats.top1) and torch.equal(stats2.count, stats.count)
    for name, grad in grads.items():
        error = (grads2[name].float() - grad.float()).norm() / grad.float().norm().clamp_min(1e-9)
        assert error < tolerance * 10, f"{case} K={K} multiple={multiple} {dtype}: {name} differs by {error:.2e}"


def compare_updates(dtype, lean):
    runs = []
    for run in (update_plain, update):
        flat = FlatParams(tiny_config(), "cpu", dtype)
        gen = torch.Generator().manual_seed(0)
        flat.param.copy_(torch.randn(flat.numel, generator=gen) * 0.1)
        opt = FusedAdamW(flat, weight_decay=0.1, lean=lean)
        for _ in range(3):
            flat.grad.copy_(torch.randn(flat.numel, generator=gen) * 1e-2)
            opt.set_lr(1e-2)
            norm = opt.reduce()
            opt.state["count"] += 1
            run(opt, opt._scalars(norm))
        run(opt, opt._scalars(torch.tensor(float("nan"))))
        runs.append((flat.param.clone(), {k: v.clone() for k, v in opt.state.items()}))
    (param, state), (param2, state2) = runs
    torch.testing.assert_close(param2.float(), param.float(), rtol=1e-2 if lean else 1e-5, atol=1e-3 if lean else 1e-6)
    for name in state:
        if lean and name in "mv":
            assert ((state2[name].int() - state[name].int()).abs() <= 1).float().mean() > 0.999
        elif name == "low":
            assert param.dtype == torch.bfloat16
        else:
            torch.testing.assert_close(state2[name], state[name], rtol=1e-4, atol=1e-7)


if __name__ == "__main__":
    for case, K, multiple in (
        ("plain", 3, 1), ("plain", 3, 128), ("every norm", 2, 1), ("both fc norms", 1, 128), ("no grouping", 4, 1),
        ("bias", 2, 1), ("part of the head rotated", 2, 1), ("own embedding", 2, 128), ("one key head", 3, 1),
    ):  # fmt: skip
        compare_steps(case, K, multiple, torch.float32, 2e-5)
    compare_steps("plain", 3, 1, torch.bfloat16, 2e-2)
    compare_steps("plain", 3, 1, torch.float32, 2e-5, full=True)
    for dtype in (torch.float32, torch.bfloat16):
        for lean in (False, True):
            compare_updates(dtype, lean)
    assert join([document(3, 1, 0)]).tokens == 3
    print("kernels agree")
