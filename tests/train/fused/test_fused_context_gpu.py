"""A shared sequence on a GPU (bf16): two ranks, threads on one device, against autograd in float64."""

import pytest
import torch
from fused_cases import autograd
from test_fused_gpu import WIDE, gpu_step, rounded_drafter
from thread_ranks import together
from tiny_drafters import document, tiny_config, tiny_head

from draftsmith.train.batch import join
from draftsmith.train.context import slice_pack
from draftsmith.train.fused.context import CudnnFull, FlashFull, plan_context
from draftsmith.train.objective import supervision

pytestmark = pytest.mark.gpu
WEIGHTS = [1.0, 0.8, 0.64]


@pytest.mark.parametrize("groups", [{}, {"num_key_value_heads": 4}], ids=["grouped", "plain"])
@pytest.mark.parametrize(
    "sizes", [[(1024, 30)], [(90, 20), (31, 1), (300, 40)]], ids=["cudnn", "flash"]
)  # 1024 rows make chunks of 256
def test_two_ranks_on_a_gpu_equal_autograd(sizes, groups):
    model = rounded_drafter(tiny_config(**WIDE, **groups))
    head = tiny_head(model)
    head = type(head)(head.norm_weight.bfloat16().double(), 1e-5, (head.rows * 0.1).bfloat16().double())
    whole = join([document(n, b, i, model.config) for i, (n, b) in enumerate(sizes)])
    whole = whole.to("cpu", torch.bfloat16).to("cpu", torch.float64)
    counts = supervision(whole, model.t2d, 3).sum(1)
    steps = [gpu_step(model, head) for _ in range(2)]

    def work(exchange):
        step = steps[exchange.rank]
        mine = slice_pack(whole, exchange, 4)
        plan = step.plan(mine, 3)
        loss, _ = step.loss_and_grads(mine.to("cuda", torch.bfloat16), plan, WEIGHTS, counts.cuda())
        torch.cuda.synchronize()
        return float(loss)

    results, shared = together(2, work)
    assert shared.calls[0] == 4
    expected, _, grads = autograd(model, head, whole, 3)
    assert abs(sum(results) / float(expected) - 1) < 3e-3
    for name, grad in grads.items():
        ours = sum(s.flat.grads[name].cpu().double() for s in steps)
        assert (ours - grad).norm() / grad.norm() < 3e-2, name


@pytest.mark.parametrize("kind", ["cudnn", "flash"])
def test_a_rectangle_equals_attention_written_out(kind):
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(n, 4, 64, generator=gen).bfloat16().cuda() for n in (128, 256, 256, 128))

    class Whole:
        rank, count = 1, 2

    whole = join([document(512, 3, 0)])
    plan = plan_context(slice_pack(whole, Whole(), 2).context, "cuda")
    second = plan.earlier[1]  # rank 1: chunks 1 and 2 of 128 rows; 256 keys before the second
    assert (second.rows, second.keys) == (128, 256)
    part = CudnnFull(0.125) if kind == "cudnn" else FlashFull(second, 0.125)
    out, lse, state = part.forward(q, k, v)
    wide = [x.double().transpose(0, 1).requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(1, 2) * 0.125
    right = scores.softmax(-1) @ wide[2]
    right.backward(dout.double().transpose(0, 1))
    torch.testing.assert_close(out.double().transpose(0, 1), right.detach(), rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1).detach(), rtol=1e-3, atol=1e-3)
    for mine, x in zip(part.backward(dout, q, k, v, out, lse, state), wide, strict=True):
        assert (mine.double().transpose(0, 1) - x.grad).norm() / x.grad.norm() < 2e-2
