"""The cores: recompute changes nothing, bf16 parameters follow float32 masters, both read one resume form."""

import pytest
import torch
from test_loop import section
from tiny_drafters import document, tiny_drafter, tiny_head

from draftsmith.errors import UserError
from draftsmith.train.batch import join
from draftsmith.train.core import HandCore, ReferenceCore, build
from draftsmith.train.objective import step_weights, supervision


def pack(dtype=torch.float32):
    return join([document(9, 3, 0), document(14, 6, 2)], pad_to=28).to("cpu", dtype)


def stepped(core, count=3, lr=0.01):
    losses = []
    for i in range(count):
        batch = (
            pack(core.model.fc.weight.dtype)
            if i != 1
            else join([document(12, 2, 9)]).to("cpu", core.model.fc.weight.dtype)
        )
        counts = supervision(batch, core.model.t2d, 3).sum(1)
        loss, _ = core.step(batch, 3, step_weights(0.8, 3), counts)
        losses.append(float(loss.detach()))
        core.update(lr, 1.0)
    return losses


def reference(dtype=torch.float32, **kwargs):
    model = tiny_drafter(dtype=torch.float32).to(dtype)
    return ReferenceCore(model, tiny_head(model, torch.float32).to("cpu", dtype), section(), **kwargs)


def test_recompute_gives_the_same_losses_and_weights():
    kept, again = reference(), reference(recompute=True)
    assert stepped(kept) == pytest.approx(stepped(again), rel=1e-6)
    for (name, a), (_, b) in zip(kept.model.trained(), again.model.trained(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_small_updates_are_not_lost_in_bfloat16():
    """At a rate whose updates are far below bf16's spacing, masters move on and the parameters follow in the end."""
    core = reference(torch.bfloat16)
    start = core.model.norm.weight.detach().clone()
    masters = {n: t.clone() for n, t in core.state().items() if n.startswith("weight.")}
    stepped(core, count=12, lr=4e-4)
    moved = core.state()["weight.norm.weight"] - masters["weight.norm.weight"]
    assert core.state()["weight.norm.weight"].dtype == torch.float32
    assert moved.abs().max() > 1e-3
    assert (core.model.norm.weight.detach() != start).any()
    assert torch.equal(core.model.norm.weight.detach(), core.state()["weight.norm.weight"].bfloat16())


def test_the_hand_written_step_serves_the_llama_form_and_the_reference_all_else():
    model = tiny_drafter(dtype=torch.float32)
    assert isinstance(build(model, tiny_head(model, torch.float32), section()), HandCore)
    assert isinstance(build(model, tiny_head(model, torch.float32), section(), hand=False), ReferenceCore)
    from rank_side import make

    assert isinstance(make("mla", section()), ReferenceCore)
    core = build(model, tiny_head(model, torch.float32), section(recompute=True))
    assert isinstance(core, ReferenceCore) and core.recompute


@pytest.mark.parametrize("optimizer", ["adamw-lean", "muon"])
def test_another_optimizer_is_not_dropped_silently(optimizer):
    from rank_side import make

    model = tiny_drafter(dtype=torch.float32)
    for sec in (section(optimizer=optimizer, recompute=True), section(optimizer=optimizer)):
        with pytest.raises(UserError, match=optimizer):
            build(model, tiny_head(model, torch.float32), sec) if sec.recompute else make("mla", sec)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-lean"])
def test_hand_and_reference_take_the_same_steps(optimizer):
    model = tiny_drafter(dtype=torch.float32)
    hand = HandCore(model, tiny_head(model, torch.float32), section(optimizer=optimizer))
    ours, theirs = stepped(hand), stepped(reference())
    assert ours == pytest.approx(theirs, rel=1e-4 if optimizer == "adamw" else 0.05)
