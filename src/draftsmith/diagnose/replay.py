"""How well a setup would draft on the sample: acceptance by the engine's walk, and a finer score that also moves where
acceptance is still zero.

The score is the negative log-likelihood that the drafter gives to the target's own choice, at each position from which
the target answers. Two setups are compared position by position on the same text, so small true differences show.
Shapes: N scored positions, T tokens of all rows packed, D draft vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.diagnose.subject import SampleRow, Setup, Subject
from draftsmith.drafter.model import Drafter, Steps
from draftsmith.train.batch import join
from draftsmith.train.objective import shift
from draftsmith.train.validate import Acceptance, agreement, proposals, walk

UNDRAFTABLE = 20.0
"""Nats charged where the target's choice is outside the draft vocab: it can never be proposed."""
CLUSTER = 16
"""Neighbouring positions of a row that count as one observation: what they share is the text around them."""
MAP = frozenset({"d2t", "t2d"})


@dataclass(frozen=True)
class Score:
    """nll float32 [N]: per (step, position) nats, undraftable choices at a constant; row int64 [N]: which row each is of."""

    nll: Tensor
    row: Tensor

    @property
    def mean(self) -> float:
        return float(self.nll.mean())

    def gain_over(self, base: Score) -> tuple[float, float]:
        """(mean nats gained against `base`, its standard error over clusters of neighbouring positions)."""
        delta = base.nll - self.nll
        index = torch.arange(len(delta))
        start = torch.ones(len(delta), dtype=torch.bool)
        start[1:] = (self.row[1:] != self.row[:-1]) | ((index[1:] % CLUSTER) == 0)
        cluster = start.long().cumsum(0) - 1
        count = int(cluster[-1]) + 1
        sizes = torch.zeros(count).index_add_(0, cluster, torch.ones_like(delta))
        means = torch.zeros(count).index_add_(0, cluster, delta) / sizes
        error = float(means.std() / count**0.5) if count > 1 else float("inf")
        return float(delta.mean()), error


@dataclass(frozen=True)
class _Drafted:
    """What a setup says, before its map is asked: logits float32 [N, D], wanted int64 [N] the target's choices."""

    logits: list[Tensor]
    wanted: Tensor
    row: Tensor


class Replayer:
    """Scores setups on rows packed into one batch. The last drafts are kept, so that setups which differ in nothing
    but the map cost a lookup. steps: draft steps that are scored."""

    def __init__(self, rows: list[SampleRow], steps: int = 2) -> None:
        self.rows, self.steps = rows, steps
        self._key: tuple[object, ...] = ()
        self._setup: Setup | None = None  # kept alive: the key holds its tensors' ids
        self._drafted: _Drafted | None = None
        self._model: Drafter | None = None

    def score(self, setup: Setup) -> Score:
        """Nats per position and step."""
        key = (
            setup.config.model_dump_json(),
            setup.aux_ids,
            setup.blocks,
            id(setup.embedding),
            *sorted((n, id(t)) for n, t in setup.tensors.items() if n not in MAP),
        )
        if key != self._key or self._drafted is None:
            self._drafted, self._key, self._setup = self._draft(setup), key, setup
        drafted = self._drafted
        to_draft = torch.full((setup.config.vocab_size,), -1, dtype=torch.int64)
        ids = torch.arange(setup.config.draft_vocab_size) + setup.tensors["d2t"]
        inside = (ids >= 0) & (ids < setup.config.vocab_size)
        to_draft[ids[inside]] = torch.arange(len(ids))[inside]
        wanted = to_draft[drafted.wanted]
        picked = [
            logp.gather(1, w.clamp(min=0)[:, None])[:, 0]
            for logp, w in zip(drafted.logits, wanted.split([len(x) for x in drafted.logits]), strict=True)
        ]
        nll = (-torch.cat(picked)).clamp(max=UNDRAFTABLE)
        nll = torch.where(wanted >= 0, nll, torch.full_like(nll, UNDRAFTABLE))
        return Score(torch.nan_to_num(nll, nan=UNDRAFTABLE, posinf=UNDRAFTABLE), drafted.row)

    @torch.no_grad()
    def _draft(self, setup: Setup) -> _Drafted:
        fits = self._model is not None and self._model.config == setup.config
        model = self._model = setup.module(self._model if fits else None)
        batch = join([setup.batch(row) for row in self.rows])
        spans = batch.spans
        boundary = torch.cat([torch.full((b - a,), r.boundary) for r, (a, b) in zip(self.rows, spans, strict=True)])
        length = torch.cat([torch.full((b - a,), b - a) for a, b in spans])
        state, done = model.fuse(batch.aux), Steps(spans=spans)
        logits, wanted, owners = [], [], []
        for s in range(self.steps):
            normed, state = model.step(state, model.embed(shift(batch.token_ids, s + 1, 0)), batch.position + s, done)
            # Row t proposes token t + 2 + s; the target's own choice there is argmax[t + 1 + s].
            valid = (batch.position + 2 + s < length) & (batch.position + 1 + s >= boundary - 1)
            for rows in valid.nonzero()[:, 0].split(1024):
                logits.append(torch.log_softmax(model.lm_head(normed[rows]).float(), dim=-1))
            wanted.append(shift(batch.argmax, s + 1, 0)[valid].clamp(min=0))
            owners.append(batch.doc[valid].long())
        return _Drafted(logits, torch.cat(wanted), torch.cat(owners))


def score(setup: Setup, rows: list[SampleRow], steps: int = 2) -> Score:
    """Nats per position and step of `rows` under `setup`."""
    return Replayer(rows, steps).score(setup)


@torch.no_grad()
def acceptance(setup: Setup, rows: list[SampleRow], steps: int, past: int = 0) -> Acceptance:
    """The engine's walk over every row under `setup`. past: tokens at each row's end that were never output (`walk`)."""
    model = setup.module()
    total = Acceptance([0] * steps)
    for row in rows:
        batch = setup.batch(row)
        total += walk(
            agreement(batch, proposals(model, batch, steps)).tolist(), row.boundary, row.tokens - past, steps, past
        )
    return total


def base_acceptance(subject: Subject) -> Acceptance:
    """Acceptance of the drafter as its files say."""
    return acceptance(subject.setup(), subject.rows, subject.steps)


def shortened(rows: list[SampleRow], count: int, answer: int) -> list[SampleRow]:
    """The `count` rows with the shortest prompts, each cut to `answer` tokens of its answer: a sample for screening."""
    some = sorted((r for r in rows if r.tokens > r.boundary + 8), key=lambda r: r.boundary)[:count] or rows[:count]
    out = []
    for r in some:
        T = min(r.tokens, r.boundary + answer)
        out.append(SampleRow(r.row_id, r.source, r.token_ids[:T], r.boundary, r.streams[:, :T], r.argmax[:T]))
    return out
