"""What-ifs: each says "suppose this one thing had been meant otherwise", and gives the setups to try.

A table; a family is one cause, its variants the ways it can be wrong. The one whose correction makes the drafter draft
best is the likeliest cause (rank.py). The what-ifs of a converter's slips (blocks swapped, weights laid out otherwise)
are in slips.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations

import torch

from draftsmith.diagnose import slips
from draftsmith.diagnose.subject import Setup, Subject
from draftsmith.train.init import rope_of

Variants = Iterator[tuple[str, Setup]]


@dataclass(frozen=True)
class Family:
    """id; cause and fix in words ({v} = the variant's label); variants; apply: whether the mended setup can be written as
    a drafter (config or tensors of the same inventory); further: a step on from the best variant, tried as long as it
    helps; steps: draft steps that it takes to see a variant."""

    id: str
    cause: str
    fix: str
    variants: Callable[[Subject, Setup], Variants]
    apply: bool = True
    further: Callable[[Subject, Setup], Variants] | None = None
    steps: int = 1


def aux_single(subject: Subject, setup: Setup) -> Variants:
    """One id moved by one or two layers; streams change smoothly from layer to layer, so what lies further off is reached
    step by step (`aux_neighbours`)."""
    for i, k in enumerate(setup.aux_ids):
        for moved in (k - 1, k + 1, k - 2, k + 2):
            ids = (*setup.aux_ids[:i], moved, *setup.aux_ids[i + 1 :])
            if _possible(ids, subject.num_layers):
                yield f"{list(subject.setup().aux_ids)} → {list(ids)}", _ids(setup, ids)


def aux_neighbours(subject: Subject, setup: Setup) -> Variants:
    """Any one id moved by one layer, from where the best variant stands."""
    for label, moved in aux_single(subject, setup):
        if sum(abs(a - b) for a, b in zip(setup.aux_ids, moved.aux_ids, strict=True)) == 1:
            yield label, moved


def aux_all(subject: Subject, setup: Setup) -> Variants:
    """All ids in another numbering, or those that other trainers take by default."""
    n = subject.num_layers
    whole: list[tuple[int, ...]] = [tuple(k + d for k in setup.aux_ids) for d in (-1, 1, -2, 2)]
    if len(setup.aux_ids) == 3:
        whole += [(2, n // 2, n - 3), (1, n // 2 - 1, n - 4), (2, n // 2, n - 4), (1, n // 2, n - 3)]
    for ids in dict.fromkeys(whole):
        moved = sum(a != b for a, b in zip(ids, setup.aux_ids, strict=True))
        if moved > 1 and _possible(ids, n):
            yield f"{list(setup.aux_ids)} → {list(ids)}", _ids(setup, ids)


def _possible(ids: tuple[int, ...], layers: int) -> bool:
    return all(0 <= k <= layers for k in ids) and list(ids) == sorted(set(ids))


def _ids(setup: Setup, ids: tuple[int, ...]) -> Setup:
    return replace(setup.with_config(aux_layer_ids=list(ids)), aux_ids=ids)


def aux_order(subject: Subject, setup: Setup) -> Variants:
    """fc trained on the streams in another order: its column blocks are put back in ascending order."""
    G, A = setup.config.target_hidden_size, len(setup.aux_ids)
    if A > 4:
        return
    blocks = setup.tensors["fc.weight"].split(G, dim=1)
    for order in permutations(range(A)):
        if order == tuple(range(A)):
            continue
        yield (
            f"fc's blocks {list(order)} instead of {list(range(A))}",
            setup.with_tensors(**{"fc.weight": torch.cat([blocks[i] for i in order], dim=1)}),
        )


def norm_switches(subject: Subject, setup: Setup) -> Variants:
    norms = setup.config.norms
    for switch in ("norm_before_residual", "norm_output"):
        now = getattr(norms, switch)
        yield f"{switch} {str(now).lower()} → {str(not now).lower()}", setup.with_norms(**{switch: not now})


def input_norms(subject: Subject, setup: Setup) -> Variants:
    """Norms of the aux states off, where their tensors are there; on cannot be tried without tensors."""
    norms = setup.config.norms
    for switch, prefix in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        if getattr(norms, switch):
            tensors = {n: t for n, t in setup.tensors.items() if not n.startswith(prefix)}
            off = setup.with_norms(**{switch: False})
            yield f"{switch} true → false", replace(off, tensors=tensors)


THETAS = (1e4, 5e4, 1e5, 5e5, 1e6, 5e6, 1e7)


def rope(subject: Subject, setup: Setup) -> Variants:
    from draftsmith.target.config import load_config, text_config

    theirs = rope_of(text_config(load_config(subject.target)))
    now = setup.config.rope
    tries = [theirs, {"rope_theta": theirs.get("rope_theta"), "rope_type": "default"}]
    tries += [{**now, "rope_theta": t} for t in THETAS]
    tries += [{"rope_theta": now.get("rope_theta", 1e4), "rope_type": "default"}]
    seen = [_plain(now)]
    for r in tries:
        if _plain(r) not in seen:
            seen.append(_plain(r))
            yield f"rope {say_rope(now)} → {say_rope(r)}", setup.with_config(rope=r)


def _plain(rope: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in rope.items() if v is not None}


def say_rope(rope: dict[str, object]) -> str:
    """Theta, and the scaling where there is one."""
    kind = rope.get("rope_type", "default")
    factor = f" ×{rope['factor']:g}" if isinstance(rope.get("factor"), int | float) else ""
    theta = rope.get("rope_theta", 1e4)
    return f"theta {theta:g}{'' if kind == 'default' else f', {kind}{factor}'}"


def map_shift(subject: Subject, setup: Setup) -> Variants:
    """Every draft token some ids off, or offsets taken for ids."""
    D, V = setup.config.draft_vocab_size, setup.config.vocab_size
    d2t = setup.tensors["d2t"]
    ids = torch.arange(D) + d2t
    for d in (*range(-16, 0), *range(1, 17)):
        moved = ids + d
        # What leaves the vocabulary at its ends was cut off when the map was made wrong: the rest still tells.
        yield f"target ids {d:+d}", _map(setup, moved.clamp(0, V - 1))
    if int(d2t.min()) >= 0 and int(d2t.max()) < V and len(torch.unique(d2t)) == D and not torch.equal(d2t, ids):
        yield "d2t holds absolute ids", _map(setup, d2t)


def _map(setup: Setup, ids: torch.Tensor) -> Setup:
    t2d = torch.zeros(setup.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return setup.with_tensors(d2t=ids - torch.arange(len(ids)), t2d=t2d)


def map_other(subject: Subject, setup: Setup) -> Variants:
    """The map of the run's vocab stage, that which the checkpoint's own t2d implies, and that which lm_head's rows
    name: a head that was begun from the target's rows still lies nearest to them."""
    D = setup.config.draft_vocab_size
    now = torch.arange(D) + setup.tensors["d2t"]
    tries = [("the map that t2d implies", torch.nonzero(setup.tensors["t2d"]).flatten())]
    if subject.run_folder is not None and (subject.run_folder / "vocab" / "vocab.safetensors").exists():
        from draftsmith.vocab.map import VocabMap

        run_ids = torch.as_tensor(VocabMap.load(subject.run_folder / "vocab").draft_to_target())
        tries.append(("the map of the run's vocab stage", run_ids))
    if (named := slips.rows_named_by_head(subject, setup)) is not None:
        tries.append(("the map that lm_head's rows name (nearest row of the target's head)", named))
    for label, ids in tries:
        if len(ids) == D and not torch.equal(ids, now):
            yield label, _map(setup, ids)


def embedding(subject: Subject, setup: Setup) -> Variants:
    if setup.config.own_embedding and setup.config.hidden_size == setup.config.target_hidden_size:
        shared = setup.with_config(own_embedding=False)
        tensors = {n: t for n, t in setup.tensors.items() if n != "embed_tokens.weight"}
        yield "the target's table instead of embed_tokens.weight", replace(shared, tensors=tensors)


FAMILIES: tuple[Family, ...] = (
    Family(
        "aux.one",
        "one aux layer id is off: {v}",
        "write the ids that were trained on",
        aux_single,
        further=aux_neighbours,
    ),
    Family(
        "aux.all",
        "the aux layer ids are in another numbering: {v}",
        "write the ids in the engine's meaning (entering layer k)",
        aux_all,
        further=aux_neighbours,
    ),
    Family(
        "aux.order",
        "the aux streams were joined in another order in training: {v}",
        "reorder fc's column blocks",
        aux_order,
    ),
    Family(
        "norms.switch", "a norm switch is not as trained: {v}", "write the switch as trained", norm_switches, steps=2
    ),
    Family(
        "norms.input",
        "a norm of the aux states that was not trained: {v}",
        "switch it off and leave its tensors out",
        input_norms,
    ),
    Family("rope", "rotary embeddings differ from training: {v}", "write the rope that was trained with", rope),
    Family(
        "map.shift", "the draft vocab map is shifted: {v}", "re-make d2t: offsets, target id = i + d2t[i]", map_shift
    ),
    Family(
        "map.other",
        "the draft vocab map is of another drafter: {v}",
        "use the map of this drafter's own training",
        map_other,
    ),
    Family(
        "embedding",
        "the drafter carries an embedding table it was not trained with: {v}",
        "leave embed_tokens.weight out",
        embedding,
    ),
    Family(
        "head",
        "lm_head is not the one that was trained: {v}",
        "find the trained lm_head.weight, or train again from this one",
        slips.head,
        apply=False,
    ),
    Family(
        "layout.halves",
        "q, k and v see their two halves in the other order: {v}",
        "swap the column halves: the engine's order is [embedding; state]",
        slips.halves,
    ),
    Family(
        "layout.mlp",
        "gate_proj and up_proj are exchanged: {v}",
        "exchange the two tensors",
        slips.mlp,
    ),
    Family(
        "layout.rope",
        "the heads of q and k are laid out for another rotation: {v}",
        "permute the rows of q_proj and k_proj",
        slips.rotation,
    ),
    Family(
        "norms.offset",
        "norm weights are stored as 1 + w or w − 1: {v}",
        "store the weights as the engine multiplies them",
        slips.norm_offset,
    ),
    Family(
        "fuse.scale",
        "the scaling of the aux channels in training is not in fc: {v}",
        "fold the scaling into fc's columns, or write the norm that was trained",
        slips.aux_scale,
        apply=False,
    ),
)
