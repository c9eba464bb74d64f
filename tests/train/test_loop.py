"""The loop: exact resume, choice of the best, and its refusals."""

import json
from dataclasses import replace

import pytest
import torch
from fake_states import fake_store
from tiny_drafters import tiny_drafter, tiny_head

from draftsmith.dialects import native
from draftsmith.errors import UserError
from draftsmith.recipe import TrainSection
from draftsmith.train.checkpoint import read_resume
from draftsmith.train.core import build
from draftsmith.train.data import channel_rms, split_rows
from draftsmith.train.loop import Training
from draftsmith.ui import QuietUi


def section(**changes):
    return TrainSection.model_validate(
        {"steps": 8, "batch_tokens": 64, "eval_every": 2, "ttt_steps": 2, "lr": 0.01, "held_out_rows": 0.2} | changes
    )


def training(folder, sec=None, hand=True, store=None, **changes):
    sec = sec or section()
    store = store or fake_store()
    split = split_rows(store.index, sec.held_out_rows)
    model = tiny_drafter(dtype=torch.float32)
    core = build(model, tiny_head(model, torch.float32), sec, hand=hand)
    made = Training(
        core=core,
        source=store,
        split=split,
        section=sec,
        contract=store.contract,
        folder=folder,
        ui=QuietUi(),
        rms=channel_rms(store, split.train),
    )
    return replace(made, **changes) if changes else made


class Killed(BaseException):
    pass


def killed_after(run, steps):
    """Raise in the middle of a step, as a kill would end it."""
    inner = run.core.step

    def step(*args):
        if run.progress.steps == steps:
            raise Killed
        return inner(*args)

    run.core.step = step
    with pytest.raises(Killed):
        run.run()


def everything(folder):
    tensors, facts = read_resume(folder)
    return {n: t.clone() for n, t in tensors.items()}, facts, (folder / "best" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("hand", [True, False])
@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_killed_run_ends_bit_for_bit_like_an_uninterrupted_one(tmp_path, hand, at):
    whole = training(tmp_path / "whole", hand=hand)
    figures = whole.run()
    killed_after(training(tmp_path / "killed", hand=hand), at)
    resumed = training(tmp_path / "killed", hand=hand)
    again = resumed.run()
    a, facts_a, bytes_a = everything(tmp_path / "whole")
    b, facts_b, bytes_b = everything(tmp_path / "killed")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert facts_a == facts_b
    assert bytes_a == bytes_b
    assert figures["acceptance_per_position"] == again["acceptance_per_position"]
    lines = [(tmp_path / n / "metrics.jsonl").read_text() for n in ("whole", "killed")]
    assert lines[0] == lines[1]


def test_a_finished_run_started_again_does_nothing(tmp_path):
    first = training(tmp_path).run()
    store = fake_store()
    second = training(tmp_path, store=store)
    store.reads.clear()
    assert second.run()["best_step"] == first["best_step"]
    assert store.reads == []


def test_both_steps_walk_the_same_road(tmp_path):
    losses = []
    for hand in (True, False):
        run = training(tmp_path / str(hand), section(eval_every=8), hand=hand)
        run.run()
        losses.append([p.detach().clone() for _, p in run.core.model.trained()])
    for a, b in zip(*losses, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def test_best_is_chosen_by_acceptance_and_patience_stops(tmp_path, monkeypatch):
    scores = iter([1.2, 1.5, 1.4, 1.3, 1.9])

    def scored(model, batches, K, exchange=None):
        from draftsmith.train.validate import Acceptance

        value = next(scores)
        return Acceptance([int((value - 1) * 100), 0], drafts=100, tokens=300)

    monkeypatch.setattr("draftsmith.train.loop.acceptance", scored)
    run = training(tmp_path, section(steps=12, patience=2))
    kept = {}
    inner = run._validate

    def validate():
        inner()
        kept[run.progress.steps] = {n: p.detach().clone() for n, p in run.core.model.trained()}

    run._validate = validate
    figures = run.run()
    assert figures["best_step"] == 4
    assert figures["steps"] == 8
    assert "2 validations" in figures["stopped"]
    best = native.read(tmp_path / "best")
    assert torch.equal(best.tensors["lm_head.weight"], kept[4]["lm_head.weight"])
    torch.testing.assert_close(best.tensors["fc.weight"] * run.rms, kept[4]["fc.weight"])


def test_checkpoint_is_for_unscaled_states(tmp_path):
    """What the engine computes from raw aux states equals what training computed from scaled ones."""
    from draftsmith.train.checkpoint import load_drafter

    run = training(tmp_path, section(steps=2))
    run.run()
    drafter = load_drafter(tmp_path / "best", run.core.model.lent_embedding)
    aux = run.source.rows["row-0"].aux.flatten(1).float()
    torch.testing.assert_close(drafter.fuse(aux), run.core.model.fuse(aux / run.rms), rtol=1e-4, atol=1e-5)
    assert torch.equal(drafter.d2t, run.core.model.d2t)


def test_packs_without_a_row_to_learn_from_are_skipped_and_counted(tmp_path):
    store = fake_store()
    outside = (~tiny_drafter(dtype=torch.float32).t2d).nonzero()[0, 0]
    split = split_rows(store.index, 0.2)
    names = [e.row_id for e in split.train]
    for name in names[: len(names) // 2]:
        store.rows[name].argmax[:] = outside
    sec = section(steps=None, epochs=1, batch_tokens=12)
    figures = training(tmp_path, sec, store=store).run()
    assert figures["skipped_packs"] > 0
    assert figures["steps"] + figures["skipped_packs"] == figures["packs"]


def test_nothing_to_learn_from_at_all_is_refused(tmp_path):
    store = fake_store()
    outside = (~tiny_drafter(dtype=torch.float32).t2d).nonzero()[0, 0]
    for row in store.rows.values():
        row.argmax[:] = outside
    with pytest.raises(UserError, match=r"none of \d+ packs"):
        training(tmp_path, store=store).run()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    run = training(tmp_path)
    with torch.no_grad():
        run.core.model.lm_head.weight[0, 0] = float("inf")
    with pytest.raises(UserError, match="step 1") as e:
        run.run()
    assert e.value.code == 1


def test_a_drafter_no_better_than_the_unigram_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.train.loop.JUDGE_AFTER", 4)
    monkeypatch.setattr("draftsmith.train.loop.unigram_acceptance", lambda batches, t2d: 0.9)
    with pytest.raises(UserError, match=r"90\.0%"):
        training(tmp_path, section(warm_fraction=0.0)).run()


def test_loss_falls_and_figures_are_logged(tmp_path):
    run = training(tmp_path, section(steps=60, eval_every=20))
    run.run()
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [x["loss"] for x in lines if "loss" in x and x["draft_steps"] == 2]
    assert losses[-1] < losses[0]
    assert [x["step"] for x in lines if "acceptance_length" in x] == [20, 40, 60]
    assert len(lines[-1]["acceptance_per_position"]) == 2
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_learning_rate_and_draft_steps_follow_progress():
    from draftsmith.train.schedule import Schedule

    s = Schedule(lr=1.0, min_lr=0.1, warmup=0.1, steps=3, warm_fraction=0.5)
    assert 0 < s.rate(0.0) < 0.02
    assert s.rate(0.1) == pytest.approx(1.0)
    assert s.rate(1.0) == pytest.approx(0.1)
    assert s.rate(0.3) > s.rate(0.6)
    assert [s.draft_steps(x) for x in (0, 0.49, 0.5, 1)] == [1, 1, 3, 3]


def test_the_figures_count_the_tokens_trained_on_apart_from_those_held_out(tmp_path):
    run = training(tmp_path)
    result = run.run()
    trained = sum(run.source.rows[i].tokens for n in range(result["packs"]) for i in run.order.pack(n))
    held = sum(e.tokens - e.boundary for e in run.split.held_out)
    assert result["tokens"] == trained and result["held_out_tokens"] == held != trained
