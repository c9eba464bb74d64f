"""The step on a GPU (bf16, both attention kernels, plain and as a graph) against autograd in float64."""

from dataclasses import replace

import pytest
import torch
from fused_cases import autograd
from tiny_drafters import document, tiny_config, tiny_drafter, tiny_head

from draftsmith.train.batch import join
from draftsmith.train.fused.adamw import FusedAdamW
from draftsmith.train.fused.layout import FlatParams
from draftsmith.train.fused.muon import FusedMuon
from draftsmith.train.fused.step import FusedStep

pytestmark = pytest.mark.gpu
WIDE = {"hidden_size": 256, "target_hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "vocab_size": 1000,
        "draft_vocab_size": 600}  # fmt: skip


def rounded_drafter(config):
    """Weights and states that bf16 holds exactly, so that only arithmetic differs."""
    model = tiny_drafter(config, torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_((p if "norm" in name else p * 0.1).bfloat16())
    model.attach_embedding((model.lent_embedding * 0.2).bfloat16())
    return model.double()


def gpu_step(model, head, **options):
    flat = FlatParams(model.config, "cuda", torch.bfloat16)
    flat.load(dict(model.named_parameters()))
    head = head.to("cuda", torch.bfloat16)
    return FusedStep(flat, head, model.lent_embedding.to("cuda", torch.bfloat16), model.t2d, **options)


def rounded_batch(config, even):
    sizes = [(64, 10), (64, 30), (64, 1)] if even else [(90, 20), (31, 1), (64, 40)]
    batch = join([document(n, b, i, config) for i, (n, b) in enumerate(sizes)])
    return batch.to("cpu", torch.bfloat16).to("cpu", torch.float64)


@pytest.mark.parametrize("case", [{}, {"num_key_value_heads": 4}, {"norms": {"norm_before_residual": True,
    "norm_output": True, "fc_norm": True}}, {"attention_bias": True}], ids=["grouped", "plain", "norms", "bias"])  # fmt: skip
@pytest.mark.parametrize("multiple", [1, 128])
@pytest.mark.parametrize("even", [True, False], ids=["cudnn", "flash"])
def test_gpu_equals_autograd(case, multiple, even):
    model = rounded_drafter(tiny_config(**WIDE, **case))
    head = tiny_head(model)
    head = type(head)(head.norm_weight.bfloat16().double(), 1e-5, (head.rows * 0.1).bfloat16().double())
    batch = rounded_batch(model.config, even)
    step = gpu_step(model, head)
    plan = step.plan(batch, 3, multiple=multiple)
    loss, stats = step.loss_and_grads(batch.to("cuda", torch.bfloat16), plan, [1.0, 0.8, 0.64])
    expected, ref_stats, grads = autograd(model, head, batch, 3)
    assert abs(float(loss) / float(expected) - 1) < 3e-3
    assert ((stats.top1.cpu() - ref_stats.top1).abs() <= 3).all()
    for name, grad in grads.items():
        ours = step.flat.grads[name].cpu().double()
        error = (ours - grad).norm() / grad.norm()
        assert error < 3e-2, f"{name}: {error:.2e}"


def test_gpu_step_from_a_shortened_teacher_equals_autograd():
    """States stored as top k: the rest of the mass is spread over the other draft tokens, on the GPU as in autograd."""
    from draftsmith.extract.codecs import topk_of_logits

    model = rounded_drafter(tiny_config(**WIDE))
    head = tiny_head(model)
    batch = rounded_batch(model.config, False)
    normed = batch.final * torch.rsqrt(batch.final.square().mean(-1, keepdim=True) + head.eps) * head.norm_weight
    top = topk_of_logits(normed @ head.rows.T * 0.1, 32)
    rounded = tuple(x.bfloat16().double() for x in (top.logits, top.rest))
    batch = replace(batch, final=None, topk=(top.ids, *rounded))
    step = gpu_step(model, head)
    loss, _ = step.loss_and_grads(batch.to("cuda", torch.bfloat16), step.plan(batch, 3), [1.0, 0.8, 0.64])
    expected, _, grads = autograd(model, head, batch, 3)
    assert abs(float(loss) / float(expected) - 1) < 3e-3
    for name, grad in grads.items():
        error = (step.flat.grads[name].cpu().double() - grad).norm() / grad.norm()
        assert error < 3e-2, f"{name}: {error:.2e}"


def test_gpu_graph_repeats_the_plain_step():
    from draftsmith.train.fused.capture import CapturedStep

    model = rounded_drafter(tiny_config(**WIDE))
    head = tiny_head(model)
    batches = [rounded_batch(model.config, True) for _ in range(4)]
    runs = []
    for graph in (False, True):
        step = gpu_step(model, head)
        opt = FusedAdamW(step.flat)
        captured = CapturedStep(step, opt, [1.0, 0.8]) if graph else None
        losses = []
        for batch in batches:
            plan, inputs = step.plan(batch, 2, multiple=128), batch.to("cuda", torch.bfloat16)
            if captured:
                losses.append(float(captured(inputs, plan, 1e-2)[0]))
            else:
                losses.append(float(step.loss_and_grads(inputs, plan, [1.0, 0.8])[0]))
                opt.step(1e-2)
        runs.append(losses)
    assert runs[0] == pytest.approx(runs[1], rel=2e-3)
    assert runs[0][0] > runs[0][-1]


@pytest.mark.parametrize("lean", [False, True])
def test_gpu_optimizer_equals_plain_torch(lean):
    from draftsmith.train.fused.adamw import update_plain
    from draftsmith.train.fused.triton_adamw import update

    results = []
    for run in (update_plain, update):
        flat = FlatParams(tiny_config(**WIDE), "cuda", torch.bfloat16)
        gen = torch.Generator("cuda").manual_seed(0)
        flat.param.copy_(torch.randn(flat.numel, generator=gen, device="cuda") * 0.1)
        opt = FusedAdamW(flat, lean=lean, weight_decay=0.1)
        for scale in (1e-2, 1e-3, float("nan")):
            flat.grad.copy_(torch.randn(flat.numel, generator=gen, device="cuda") * scale)
            opt.set_lr(1e-2)
            norm = opt.reduce()
            opt.state["count"] += norm.isfinite()
            run(opt, opt._scalars(norm))
        results.append(flat.param.float())
    assert torch.isfinite(results[1]).all()
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3 if lean else 1e-5)


def test_gpu_muon_moves_as_on_the_cpu_and_a_captured_one_as_a_plain_one():
    results = []
    for device, captured in (("cpu", False), ("cuda", False), ("cuda", True)):
        flat = FlatParams(tiny_config(), device, torch.bfloat16, split=True)
        gen = torch.Generator().manual_seed(0)
        flat.param.copy_(torch.randn(flat.numel, generator=gen) * 0.1)
        before = flat.param.float().cpu()
        opt = FusedMuon(flat, weight_decay=0.1)
        grads = [torch.randn(flat.numel, generator=gen).bfloat16() for _ in range(3)]
        opt.set_lr(1e-2)
        kept = torch.empty_like(flat.grad)
        flat.grad.copy_(grads[0])
        opt.step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                flat.grad.copy_(kept)
                opt.step()
        for grad in grads[1:]:
            if captured:
                kept.copy_(grad)
                graph.replay()
            else:
                flat.grad.copy_(grad)
                opt.step()
        results.append(flat.param.float().cpu() - before)
    plain, gpu, replayed = results
    assert torch.equal(gpu, replayed)
    assert (gpu - plain).norm() < 0.05 * plain.norm()  # bfloat16 iterations against float32 ones
