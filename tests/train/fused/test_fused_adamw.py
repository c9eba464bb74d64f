"""One-pass AdamW against torch's own, its split masters and its 8-bit moments."""

import pytest
import torch
from tiny_drafters import tiny_config

from draftsmith.train.fused.adamw import FusedAdamW, decode, dice, encode, join_master, split_master
from draftsmith.train.fused.layout import BLOCK, FlatParams


def flat_params(dtype, seed=0):
    flat = FlatParams(tiny_config(), "cpu", dtype)
    flat.param.copy_(torch.randn(flat.numel, generator=torch.Generator().manual_seed(seed)) * 0.1)
    return flat


def gradients(flat, steps):
    gen = torch.Generator().manual_seed(7)
    for i in range(steps):
        yield torch.randn(flat.numel, generator=gen).mul_(10.0 ** (i % 3 - 2)).to(flat.grad.dtype)


def torch_adamw(flat, lr, steps, **kw):
    """The same updates by torch.optim on float32 copies."""
    dtype = torch.promote_types(flat.param.dtype, torch.float32)
    parts = [flat.param[: flat.decayed].to(dtype), flat.param[flat.decayed :].to(dtype)]
    params = [torch.nn.Parameter(p.clone()) for p in parts]
    groups = [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), **kw)
    for grad in gradients(flat, steps):
        for p, g in zip(params, grad.to(dtype).split([len(p) for p in params]), strict=True):
            p.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
    return torch.cat([p.detach() for p in params])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_torch(dtype):
    flat = flat_params(dtype)
    expected = torch_adamw(flat, 1e-2, 5)
    opt = FusedAdamW(flat, weight_decay=0.1)
    for grad in gradients(flat, 5):
        flat.grad.copy_(grad)
        norm = opt.step(1e-2)
        torch.testing.assert_close(norm.double(), grad.double().norm(), rtol=1e-3, atol=0)
    master = join_master(flat.param, opt.state["low"]) if dtype == torch.bfloat16 else flat.param
    torch.testing.assert_close(master, expected, rtol=2e-5, atol=2e-6)


def test_split_master_is_exact():
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int64).int()
    values = bits.view(torch.float32)
    values = torch.cat([values[values.isfinite() & (values.abs() < 1e38)], torch.tensor([0.0, -0.0, 1.0, 1.00390625])])
    param, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split_master(values, param, low)
    assert torch.equal(join_master(param, low).view(torch.int32), values.view(torch.int32))
    assert torch.equal((param.float() - values).abs() <= (values.bfloat16().float() - values).abs() * 1.0001,
                       torch.ones_like(values, dtype=torch.bool))  # fmt: skip


def test_24_bit_master_keeps_the_mean():
    values = torch.randn(4096) * 0.1
    param, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int8)
    mean = torch.zeros_like(values, dtype=torch.float64)
    for t in range(256):
        split_master(values, param, low, dice(4096, torch.tensor(t), values.device)[2])
        joined = join_master(param, low)
        assert ((joined - values).abs() <= values.abs() * 2**-15).all()
        mean += joined.double() / 256
    assert ((mean - values).abs() / values.abs()).mean() < 2**-15 / 16


def test_gradient_that_is_not_finite_changes_nothing():
    flat = flat_params(torch.float32)
    opt = FusedAdamW(flat)
    flat.grad.fill_(0.1)
    opt.step(1e-2)
    before = flat.param.clone(), {k: v.clone() for k, v in opt.state.items()}
    flat.grad[3] = float("nan")
    assert opt.step(1e-2).isnan()
    assert torch.equal(flat.param, before[0])
    assert all(torch.equal(v, before[1][k]) for k, v in opt.state.items())


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_bit_for_bit(dtype, lean):
    runs = []
    for stop in (None, 2):
        flat = flat_params(dtype)
        opt = FusedAdamW(flat, lean=lean)
        for i, grad in enumerate(gradients(flat, 4)):
            if i == stop:
                saved = flat.param.clone(), {k: v.clone() for k, v in opt.state_dict().items()}
                flat = flat_params(dtype, seed=99)
                opt = FusedAdamW(flat, lean=lean)
                flat.param.copy_(saved[0])
                opt.load_state_dict(saved[1])
            flat.grad.copy_(grad)
            opt.step(1e-2)
        runs.append(flat.param.clone())
    assert torch.equal(*runs)


def test_state_of_another_form_is_refused():
    full, lean = (FusedAdamW(flat_params(torch.float32), lean=x) for x in (False, True))
    with pytest.raises(ValueError, match="another optimizer"):
        full.load_state_dict(lean.state_dict())


def test_codes_are_unbiased_and_never_lose_a_divisor():
    gen = torch.Generator().manual_seed(0)
    m = torch.randn(BLOCK * 8, generator=gen) * torch.rand(BLOCK * 8, generator=gen) ** 4
    v = m.square() * 0.3 + 1e-12
    means = torch.zeros(2, BLOCK * 8)
    for t in range(400):
        codes = encode(m, v, *dice(m.numel(), torch.tensor(t), m.device)[:2])
        means += torch.stack(decode(*codes)) / 400
        assert (codes[1][v > 0] > 0).all()
    scale = m.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    assert ((means[0] - m).abs() < 4e-3 * scale).all()
    large = v > 1e-4 * v.view(-1, BLOCK).amax(1).repeat_interleave(BLOCK)
    assert ((means[1] - v).abs()[large] < 0.1 * v[large]).all()


def test_lean_state_is_three_bytes_a_parameter():
    flat = flat_params(torch.bfloat16)
    size = {lean: sum(t.nbytes for t in FusedAdamW(flat, lean=lean).state.values()) for lean in (False, True)}
    assert size[False] / flat.numel == pytest.approx(10, abs=0.01)
    assert size[True] / flat.numel == pytest.approx(3.03, abs=0.01)


@pytest.mark.parametrize("lean", [False, True])
def test_learns_a_small_problem(lean):
    """A fixed regression through a bf16 buffer: 8-bit moments reach the loss of full ones."""
    flat = flat_params(torch.bfloat16, seed=1)
    goal = torch.randn(flat.numel, generator=torch.Generator().manual_seed(2)) * 0.1
    opt = FusedAdamW(flat, weight_decay=0.0, lean=lean)
    noise = torch.Generator().manual_seed(3)
    for i in range(300):
        error = flat.param.float() - goal
        flat.grad.copy_(error + 0.1 * torch.randn(flat.numel, generator=noise))
        opt.step(1e-2 * (1 - i / 300))
    assert (flat.param.float() - goal).square().mean() < 4e-4  # starts at 2e-2
