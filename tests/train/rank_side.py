"""One rank of the tests in test_ranks.py: python rank_side.py OUT MODE FORM… [-- MODE FORM…] (under torchrun, or alone).

MODE step: one optimizer step, each rank with its own pack; a number N: the loop over N packs in OUT/FORM. FORM hand,
muon (hand's, with that optimizer), reference or mla; with +context behind it, two ranks share each pack. MODE reduce: a
gradient that is large on one rank and small on the others; FORM sharded or whole.
Written: OUT/MODE-COUNT-FORM.safetensors."""

import sys
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from fake_states import fake_store
from test_loop import section
from tiny_drafters import document, tiny_config, tiny_drafter, tiny_head

from draftsmith.train.batch import join
from draftsmith.train.context import slice_pack
from draftsmith.train.core import build
from draftsmith.train.data import channel_rms, split_rows
from draftsmith.train.fused.adamw import FusedAdamW
from draftsmith.train.fused.layout import BLOCK, FlatParams
from draftsmith.train.loop import Training
from draftsmith.train.objective import step_weights, supervision
from draftsmith.train.parallel import Place, process_group
from draftsmith.ui import QuietUi

MLA = {"q_lora_rank": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


class Stopped(Exception):  # noqa: N818
    pass


def shared(form, ranks):
    """Ranks that share a pack."""
    return min(ranks.count, 2) if form.endswith("+context") else 1


def make(form, sec):
    form = form.removesuffix("+context")
    config = tiny_config(form="mla", mla=MLA, num_key_value_heads=4) if form == "mla" else tiny_config()
    model = tiny_drafter(config, dtype=torch.float32)
    return build(model, tiny_head(model, torch.float32), sec, hand=form in ("hand", "muon"))


def optimizer(form):
    return "muon" if form == "muon" else "adamw"


def weights(core):
    with core.whole() as model:
        return {n: p.detach().clone() for n, p in model.named_parameters()}


def one_step(ranks, form):
    sec = section(context_parallel=shared(form, ranks), optimizer=optimizer(form))
    core, place = make(form, sec), Place.of(ranks, sec, "cpu")
    packs = [
        join([document(9, 3, 1, dtype=torch.float32), document(12, 4, 2, dtype=torch.float32)]),
        join([document(15, 2, 3, dtype=torch.float32)], pad_to=18),
    ]
    mine = packs[place.data :: place.packs]
    batch = join(mine) if len(mine) > 1 else mine[0]
    if place.exchange:
        batch = slice_pack(batch, place.exchange, 3)
    counts = ranks.sum(supervision(batch, core.model.t2d, 2).sum(1))
    loss, _ = core.step(batch, 2, step_weights(0.8, 2), counts)
    norm = core.update(0.01, 0.5)
    return weights(core) | {"loss": ranks.sum(loss.reshape(1)), "norm": norm.detach().reshape(1)}


def loop(ranks, form, packs, out):
    context = shared(form, ranks)
    sec = section(steps=8 * context // ranks.count, eval_every=2, context_parallel=context, optimizer=optimizer(form))
    core = make(form, sec)
    store = fake_store()
    split = split_rows(store.index, sec.held_out_rows)
    run = Training(core, store, split, sec, store.contract, out, QuietUi(), rms=channel_rms(store, split.train))
    assert run.order.total == 8
    if packs < 8:
        run._validate = lambda: None
        inner = core.step

        def step(*args):
            if run.progress.packs >= packs:
                run.save()
                raise Stopped
            return inner(*args)

        core.step = step
    with suppress(Stopped):
        run.run()
    return weights(core) | {"packs": torch.tensor(run.progress.packs)}


def reduced(ranks, form):
    """What the hand-written core's optimizer makes of a bfloat16 gradient of 1 on rank 0 and 2^-9 on the others."""
    flat = FlatParams(tiny_config(), "cpu", torch.bfloat16, multiple=64 * BLOCK)
    adam = FusedAdamW(flat, group=torch.distributed.group.WORLD, shard=form == "sharded")
    flat.grad.fill_(1.0 if ranks.first else 2.0**-9)
    adam.reduce()
    return {"grad": adam.grad.clone()}


def main(where, mode, forms):
    with process_group() as group:
        for kind in forms:
            if mode == "reduce":
                found = reduced(group, kind)
            else:
                found = one_step(group, kind) if mode == "step" else loop(group, kind, int(mode), where / kind)
            if group.first:
                tensors = {n: t.contiguous() for n, t in found.items()}
                save_file(tensors, where / f"{mode}-{group.count}-{kind}.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = sys.argv[2:]
    with process_group():  # held open for all parts
        while given:
            end = given.index("--") if "--" in given else len(given)
            main(Path(sys.argv[1]), given[0], given[1:end])
            given = given[end + 1 :]
