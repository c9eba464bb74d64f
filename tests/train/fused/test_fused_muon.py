"""Muon over the flat buffers: against the decomposition that it approximates, torch's own Muon, and one-rank AdamW."""

import pytest
import torch
from tiny_drafters import tiny_config

from draftsmith.train.fused.adamw import FusedAdamW, join_master
from draftsmith.train.fused.layout import BLOCK, FlatParams
from draftsmith.train.fused.muon import LENGTH, FusedMuon, _shared_out, orthogonal

HIDDEN = {"fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def flat_params(dtype, seed=0, multiple=BLOCK):
    flat = FlatParams(tiny_config(), "cpu", dtype, multiple=multiple, split=True)
    gen = torch.Generator().manual_seed(seed)
    for name in sorted(flat.named):
        flat.named[name].copy_(torch.randn(flat.named[name].shape, generator=gen) * 0.1)
    return flat


def fill(flat, i):
    gen = torch.Generator().manual_seed(100 + i)
    for name in sorted(flat.grads):
        flat.grads[name].copy_(torch.randn(flat.grads[name].shape, generator=gen) * 10.0 ** (i % 3 - 2))


@pytest.mark.parametrize("shape", [(64, 64), (48, 200), (200, 48)])
def test_singular_values_come_near_one_and_directions_stay(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    core = u.T @ orthogonal(x) @ vt.T
    values = core.diagonal()
    assert ((values > 0) & (values < 1.25)).all()  # a tiny one starts too low to arrive in five iterations
    assert ((values > 0.65) & (values < 1.25))[s > 0.05 * s.max()].all()
    assert (core - values.diag()).abs().max() < 1e-6


def test_hidden_matrices_are_those_of_the_layer_and_fc():
    flat = flat_params(torch.float32)
    assert {n.split(".")[-2] for n in flat.hidden_names} == HIDDEN and len(flat.hidden_names) == len(HIDDEN)
    assert all(flat.named[n].data_ptr() < flat.param[flat.hidden :].data_ptr() for n in flat.hidden_names)


def test_hidden_matrices_move_as_torchs_muon_moves_them_and_the_rest_as_adamw():
    flat, other = flat_params(torch.float32), flat_params(torch.float32)
    mine = FusedMuon(flat, weight_decay=0.1, clip=1e9)
    adam = FusedAdamW(other, weight_decay=0.1, clip=1e9)
    copies = {n: torch.nn.Parameter(flat.named[n].clone()) for n in flat.hidden_names}
    theirs = torch.optim.Muon(copies.values(), lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for i in range(4):
        fill(flat, i)
        fill(other, i)
        for n, p in copies.items():
            p.grad = flat.grads[n].clone()
        theirs.step()
        mine.step(1e-2)
        adam.step(1e-2)
    for n, p in copies.items():
        # torch's iterates in bfloat16 everywhere: an update's elements agree to its 8 bits
        torch.testing.assert_close(flat.named[n], p.detach(), rtol=0, atol=4e-2 * 4 * 1e-2 * LENGTH)
        assert not torch.equal(flat.named[n], other.named[n])
    rest = set(flat.named) - set(flat.hidden_names)
    assert "lm_head.weight" in rest
    for n in rest:
        assert torch.equal(flat.named[n], other.named[n])


def test_an_update_is_as_long_as_adamws():
    flat = flat_params(torch.float32)
    before = {n: flat.named[n].clone() for n in flat.hidden_names}
    fill(flat, 0)
    FusedMuon(flat, weight_decay=0.0).step(1e-2)
    for n, was in before.items():
        assert (flat.named[n] - was).square().mean().sqrt().item() == pytest.approx(LENGTH * 1e-2, rel=0.35)


def test_a_bf16_master_loses_nothing():
    """Steps of 1/1000 of a weight's last bit add up, as they do in float32."""
    half, full = flat_params(torch.bfloat16), flat_params(torch.float32)
    full.param.copy_(half.param.float())
    a, b = FusedMuon(half, weight_decay=0.0), FusedMuon(full, weight_decay=0.0)
    for _ in range(50):
        fill(half, 0)
        fill(full, 0)
        a.step(1e-5)
        b.step(1e-5)
    n = half.hidden
    master = join_master(half.param[:n], a.state["hidden_low"])
    torch.testing.assert_close(master, full.param[:n], rtol=0, atol=2e-2 * 50 * 1e-5)
    assert (master - full.param[:n]).abs().mean() < 0.1 * (flat_params(torch.bfloat16).param[:n] - master).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_bit_for_bit(dtype):
    runs = []
    for stop in (None, 2):
        flat = flat_params(dtype)
        opt = FusedMuon(flat)
        for i in range(4):
            if i == stop:
                saved = flat.param.clone(), {k: v.clone() for k, v in opt.state_dict().items()}
                flat = flat_params(dtype, seed=99)
                opt = FusedMuon(flat)
                flat.param.copy_(saved[0])
                opt.load_state_dict(saved[1])
            fill(flat, i)
            opt.step(1e-2)
        runs.append(flat.param.clone())
    assert torch.equal(*runs)


def test_a_gradient_that_is_not_finite_changes_nothing():
    flat = flat_params(torch.bfloat16)
    opt = FusedMuon(flat)
    fill(flat, 0)
    opt.step(1e-2)
    before = flat.param.clone(), {k: v.clone() for k, v in opt.state.items()}
    for at in (3, flat.hidden + 3):
        fill(flat, 1)
        flat.grad[at] = float("nan")
        assert opt.step(1e-2).isnan()
        assert torch.equal(flat.param, before[0])
        assert all(torch.equal(v, before[1][k]) for k, v in opt.state.items())


def test_states_of_adamw_are_refused():
    with pytest.raises(ValueError, match="another optimizer"):
        FusedMuon(flat_params(torch.float32)).load_state_dict(FusedAdamW(flat_params(torch.float32)).state_dict())


def test_one_moment_is_kept_for_hidden_matrices():
    flat = flat_params(torch.bfloat16)
    size = sum(t.nbytes for t in FusedMuon(flat).state.values())
    assert size - 8 == flat.hidden * (2 + 4) + (flat.numel - flat.hidden) * (2 + 4 + 4)


def test_the_work_is_shared_by_cost():
    made = _shared_out([torch.zeros(s) for s in ((8, 8), (64, 64), (32, 64), (8, 64))], 2)
    cost = [sum(min(m.update.shape) * m.update.numel() for m in made if m.owner == r) for r in (0, 1)]
    assert len(made) == 4 and cost == [64 * 64 * 64, 32 * 32 * 64 + 8 * 8 * 64 + 8 * 8 * 8]
