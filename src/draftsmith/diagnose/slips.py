"""What-ifs of a converter's slips: tensors that are all there, of the right shapes, and laid out otherwise than the engine
reads them. Every function gives (label, setup) pairs as hypotheses.py does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from draftsmith.diagnose.subject import Setup, Subject
from draftsmith.errors import UserError

Variants = Iterator[tuple[str, Setup]]
ATTN, MLP = "layers.0.self_attn.", "layers.0.mlp."


def halves(subject: Subject, setup: Setup) -> Variants:
    """Projections of the attention's input with the columns of embedding and state exchanged."""
    H = setup.config.hidden_size
    readers = [f"{ATTN}{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")]
    names = [n for n in readers if n in setup.tensors]
    if names:
        yield (
            "[state; embedding] in the files",
            setup.with_tensors(**{n: torch.cat([t[:, H:], t[:, :H]], 1) for n in names for t in [setup.tensors[n]]}),
        )


def mlp(subject: Subject, setup: Setup) -> Variants:
    gate, up = f"{MLP}gate_proj.weight", f"{MLP}up_proj.weight"
    yield "up_proj's values in gate_proj", setup.with_tensors(**{gate: setup.tensors[up], up: setup.tensors[gate]})


def _permuted(weight: Tensor, dim: int, to_halves: bool) -> Tensor:
    """Rows of each head [d] from pairs (2i, 2i + 1) to halves (i, i + d/2), or back."""
    heads = weight.unflatten(0, (-1, dim))
    if to_halves:
        moved = torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1)
    else:
        moved = torch.stack([heads[:, : dim // 2], heads[:, dim // 2 :]], dim=2).flatten(1, 2)
    return moved.flatten(0, 1).contiguous()


def rotation(subject: Subject, setup: Setup) -> Variants:
    """q and k with rows for a rotation of neighbours (as Meta's own files have them), and the reverse."""
    if setup.config.form != "llama" or setup.config.head_dim % 2:
        return
    names = [f"{ATTN}{p}_proj.{kind}" for p in "qk" for kind in ("weight", "bias")]
    for label, to_halves in (("pairs in the files", True), ("halves taken for pairs", False)):
        changed = {
            n: _permuted(setup.tensors[n], setup.config.head_dim, to_halves) for n in names if n in setup.tensors
        }
        yield label, setup.with_tensors(**changed)


def norm_offset(subject: Subject, setup: Setup) -> Variants:
    norms = [n for n, t in setup.tensors.items() if t.dim() == 1 and "norm" in n and n.endswith(".weight")]
    for label, by in (("1 missing in every norm", 1.0), ("1 too much in every norm", -1.0)):
        yield label, setup.with_tensors(**{n: setup.tensors[n] + by for n in norms})


def aux_scale(subject: Subject, setup: Setup) -> Variants:
    """Each aux channel divided by its RMS over the sample, as training may have done; and each stream by its own."""
    if not subject.rows or setup.config.norms.norm_before_fc or setup.config.norms.fc_norm:
        return
    streams = [torch.cat([r.streams[k].float() for r in subject.rows]) for k in setup.aux_ids]
    fc = setup.tensors["fc.weight"]
    channel = torch.cat([s.square().mean(0).sqrt() for s in streams]).clamp(min=1e-6)
    block = torch.cat([s.square().mean().sqrt().expand(s.shape[1]) for s in streams]).clamp(min=1e-6)
    for label, rms in (("each channel by its RMS", channel), ("each stream by its RMS", block)):
        yield label, setup.with_tensors(**{"fc.weight": (fc.float() / rms).to(fc.dtype)})


def target_rows(subject: Subject) -> Tensor | None:
    """The target's lm_head times its final norm, float32 [V, G], as a drafter's head is begun from it; None where it
    cannot be read. Read once for a subject."""
    cache: dict[str, Tensor | None] = subject.__dict__.setdefault("_head", {})
    if "rows" not in cache:
        from draftsmith.target.weights import read_final_norm, read_lm_head

        try:
            cache["rows"] = read_lm_head(subject.target).float() * read_final_norm(subject.target).float()
        except (UserError, FileNotFoundError):
            cache["rows"] = None
    return cache["rows"]


def head(subject: Subject, setup: Setup) -> Variants:
    """The target's own head in place of the drafter's."""
    rows, weight = target_rows(subject), setup.tensors["lm_head.weight"]
    if rows is None or rows.shape[1] != weight.shape[1]:
        return
    own = rows[(torch.arange(len(weight)) + setup.tensors["d2t"]).clamp(0, len(rows) - 1)]
    own = own / own.square().sum(1).mean().sqrt()
    yield "even the target's own rows draft better", setup.with_tensors(**{"lm_head.weight": own})


PROBE = 128
"""Rows of lm_head that are looked at first: matching all of them costs D·V·H products."""


def rows_named_by_head(subject: Subject, setup: Setup) -> Tensor | None:
    """int64 [D]: for each row of lm_head the target token whose row of the target's head is most like it; None where the
    rows do not tell (few matches are clear), or agree with the map as it is."""
    rows, weight = target_rows(subject), setup.tensors["lm_head.weight"].float()
    if rows is None or rows.shape[1] != weight.shape[1]:
        return None
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-9)
    weight = weight / weight.norm(dim=1, keepdim=True).clamp(min=1e-9)
    now = torch.arange(len(weight)) + setup.tensors["d2t"]
    some = torch.linspace(0, len(weight) - 1, min(PROBE, len(weight))).long().unique()
    likeness, best = (weight[some] @ unit.t()).max(1)
    clear = likeness > 0.5
    if float(clear.float().mean()) < 0.5 or float((best == now[some])[clear].float().mean()) > 0.5:
        return None
    found = torch.cat([(part @ unit.t()).argmax(1) for part in weight.split(1024)])
    return _rising(found, len(rows))


def _rising(found: Tensor, V: int) -> Tensor | None:
    """The strictly rising map that most of `found` [D] agree with: those of its longest rising subsequence stay, the
    others (matched wrongly) are set between their neighbours. None where there is no room between them."""
    values = found.tolist()
    tails: list[int] = []  # index of the smallest last value of a rising run of each length
    before = [-1] * len(values)
    for i, v in enumerate(values):
        at = bisect_left(tails, v, key=lambda j: values[j])
        before[i] = tails[at - 1] if at else -1
        tails[at : at + 1] = [i]
    kept, i = [], tails[-1]
    while i >= 0:
        kept.append(i)
        i = before[i]
    kept.reverse()
    out = torch.empty(len(values), dtype=torch.int64)
    ends = [(-1, -1), *((i, values[i]) for i in kept), (len(values), V)]
    for (i, a), (j, b) in pairwise(ends):
        if b - a < j - i:
            return None
        # as far from both as they can be: i..j-1 to a..b
        for k in range(i + 1, j):
            out[k] = a + (k - i) * (b - a) // (j - i)
        if j < len(values):
            out[j] = b
    return out
