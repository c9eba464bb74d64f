"""The training loop: packs in, the best drafter out; killed at any moment, it goes on as if nothing had happened.

All that decides the result lies in the resume state (weights, moments, packs consumed, best so far, patience) or is a
function of the recipe and the rows (order, learning rate, initial weights). Nothing draws on a global random state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.contract import Contract
from draftsmith.errors import Exit, UserError
from draftsmith.extract.streamed import StreamedStates
from draftsmith.recipe import TrainSection
from draftsmith.record import atomic_write, write_json
from draftsmith.train.batch import StepBatch
from draftsmith.train.checkpoint import load_state, save_state, write_native
from draftsmith.train.context import slice_pack
from draftsmith.train.core import Core
from draftsmith.train.data import Order, RowSource, Split, read_ahead, read_pack
from draftsmith.train.objective import step_weights, supervision
from draftsmith.train.parallel import Place, Ranks
from draftsmith.train.precision import bf16_products
from draftsmith.train.schedule import Schedule
from draftsmith.train.validate import acceptance, unigram_acceptance
from draftsmith.ui import Ui

METRICS = "metrics.jsonl"
BEST = "best"
LOG_EVERY = 10
SAVE_SECONDS = 60.0
HELD_OUT_TOKENS = 100_000
JUDGE_AFTER = 200
"""Optimizer steps before a drafter that is no better than the unigram baseline is given up."""


@dataclass
class Progress:
    """What a resume needs besides tensors."""

    packs: int = 0
    steps: int = 0
    tokens: int = 0
    skipped: int = 0
    best: float = -1.0
    best_step: int = 0
    best_figures: dict[str, Any] = field(default_factory=dict)
    evaluated: int = -1
    worse: int = 0
    baseline: float = 0.0
    start: float | None = None
    finished: str = ""


@dataclass
class Training:
    """A run of the loop. rms: channel scaling of the aux states (None = none). contract: the best checkpoint's."""

    core: Core
    source: RowSource
    split: Split
    section: TrainSection
    contract: Contract
    folder: Path
    ui: Ui
    rms: Tensor | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    bf16_products: bool = False
    """Of training steps; validation multiplies in float32, as what it predicts is compared with an engine."""
    measure_start: bool = False
    """Validate before the first step: the start of an existing drafter is a candidate, and proves that it was not lost."""

    def __post_init__(self) -> None:
        s = self.section
        self.ranks = Ranks.current()
        self.place = Place.of(self.ranks, s, self.device.type)
        self.schedule = Schedule.of(s)
        self.order = Order.of_run(self.split.train, s.batch_tokens, s.seed, s.steps, s.epochs, self.place.packs)
        if not self.order.total:
            raise UserError("there is no training row", "", "capture more prompts, or hold out fewer rows")
        self.weights = step_weights(s.step_decay, s.ttt_steps)
        self.progress = Progress()
        self.inverse_rms = None if self.rms is None else 1.0 / self.rms
        self.seconds = 0.0

    # reading

    def _load(self, number: int) -> StepBatch:
        pack = self.order.pack(number)
        pad = self.device.type != "cpu"
        batch = read_pack(self.source, pack, self.section.batch_tokens, self.inverse_rms, self.dtype, pad)
        if self.place.exchange is not None:
            batch = slice_pack(batch, self.place.exchange, self.section.ttt_steps + 1, 128 if pad else 1)
        return batch.to(self.device)

    def held_out(self) -> Iterator[StepBatch]:
        """Validation packs, in the store's order, up to HELD_OUT_TOKENS; every rank reads all of them."""
        pack: list[str] = []
        size = total = 0
        for e in self.split.held_out:
            if pack and size + e.tokens > self.section.batch_tokens:
                yield self._held_out_pack(pack)
                pack, size = [], 0
            if total >= HELD_OUT_TOKENS:
                break
            pack.append(e.row_id)
            size, total = size + e.tokens, total + e.tokens
        if pack:
            yield self._held_out_pack(pack)

    def _held_out_pack(self, row_ids: list[str]) -> StepBatch:
        longest = max(e.tokens for e in self.split.held_out)
        cut = max(longest, self.section.batch_tokens)
        return read_pack(self.source, row_ids, cut, self.inverse_rms, self.dtype, pad=False).to(self.device)

    # resuming

    def restore(self) -> bool:
        """Go on from the resume state, if there is one; figures logged after it are taken back."""
        facts = load_state(self.folder, self.core, self.ranks)
        if facts is None:
            if self.ranks.first:
                atomic_write(self.folder / METRICS, "")
            return False
        self.progress = Progress(**facts)
        if self.ranks.first:
            self._take_back()
        self.ui.note(f"going on after step {self.progress.steps}, {self.progress.packs} of {self.order.total} packs")
        return True

    def _take_back(self) -> None:
        kept = []
        for line in (self.folder / METRICS).read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= self.progress.steps:
                    kept.append(line)
            except (ValueError, KeyError):
                break
        atomic_write(self.folder / METRICS, "".join(line + "\n" for line in kept))

    def save(self) -> None:
        """Write the resume state."""
        save_state(self.folder, self.core, self.ranks, self.progress.__dict__)

    # the loop

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the stage's figures."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.restore()
        self._log_open()
        started = last_save = time.monotonic()
        p, total, count = self.progress, self.order.total, self.place.packs
        first_packs, first_tokens = p.packs, p.tokens
        numbers = range(p.packs + self.place.data, total - total % count, count)
        if isinstance(self.source, StreamedStates) and not p.finished:
            self.source.expect(self.order.pack(n) for n in numbers)
        batches = read_ahead(self._load, numbers)
        if self.measure_start and p.evaluated < 0:
            self._measure_start()
        with self.ui.task("train", total, "packs") as task:
            task.advance(p.packs)
            for _, batch in batches if not p.finished else ():
                self._one(batch)
                p.packs += count
                last = p.packs + count > total
                if p.steps and (p.steps % self.section.eval_every == 0 or last) and p.evaluated != p.steps:
                    self._validate()
                    self.save()
                    last_save = time.monotonic()
                elif self.ranks.count == 1 and time.monotonic() - last_save > SAVE_SECONDS:
                    self.save()
                    last_save = time.monotonic()
                best = f", best acceptance length {p.best:.3f}" if p.best > 0 else ""
                task.advance(count, f"loss {self.last_loss:.3f}{best}")
                if p.finished:
                    break
        if not p.steps:
            raise UserError(
                f"none of {p.packs} packs held a row that can be learned from",
                "the target's choices all lie outside the draft vocab, or no answer token was found",
                "look at the vocab stage's coverage, and at the rows' boundary",
            )
        self.seconds += time.monotonic() - started
        self._log_close()
        if p.skipped:
            self.ui.note(f"{p.skipped} packs held no row to learn from and were skipped")
        rate = (p.tokens - first_tokens) / max(self.seconds, 1e-9) if p.packs > first_packs else None
        return {
            "steps": p.steps,
            "packs": p.packs,
            "skipped_packs": p.skipped,
            "tokens": p.tokens,
            "tokens_per_second": None if rate is None else round(rate, 1),
            "best_step": p.best_step,
            **({} if p.start is None else {"start_acceptance_length": round(p.start, 6)}),
            "stopped": p.finished or "all packs done",
            "baseline": round(p.baseline, 6),
            "held_out_tokens": p.best_figures.get("tokens", 0),
            **{k: v for k, v in p.best_figures.items() if k != "tokens"},
        }

    last_loss = float("nan")

    def _one(self, batch: StepBatch) -> None:
        """One optimizer step of one pack per rank (or group of ranks)."""
        p = self.progress
        done = p.packs / self.order.total
        K = self.schedule.draft_steps(done)
        counts = self.ranks.sum(supervision(batch, self.core.model.t2d, K).sum(1))
        if not int(counts[0]):
            p.skipped += 1
            return
        lr = self.schedule.rate(done)
        with bf16_products(self.bf16_products):
            loss, stats = self.core.step(batch, K, self.weights, counts)
            norm = self.core.update(lr, self.section.clip)
        p.steps += 1
        p.tokens += batch.pack_tokens * self.place.packs
        if p.steps % LOG_EVERY == 0 or p.steps == 1:
            value = float(self.ranks.sum(loss.detach().float().reshape(1)))
            if not torch.isfinite(torch.tensor(value)) or not torch.isfinite(norm):
                raise UserError(
                    f"the loss is {value} and the gradient norm {float(norm)} at step {p.steps}",
                    "the weights are lost from here on",
                    "lower train.lr; the last good state is kept and the stage goes on from it",
                    code=Exit.NO,
                )
            self.last_loss = value
            top1 = self.ranks.sum(stats.top1.float()) / counts.clamp_min(1)
            self._log(
                {
                    "loss": round(value, 6),
                    "lr": lr,
                    "draft_steps": K,
                    "grad_norm": round(float(norm), 6),
                    "top1": [round(v, 5) for v in top1.tolist()],
                    "tokens": p.tokens,
                }
            )

    def _measure_start(self) -> None:
        p = self.progress
        self._validate()
        p.start = p.best
        first = p.best_figures["acceptance_per_position"][0]
        self.ui.note(f"acceptance before the first step: {first:.1%} at position 0, length {p.best:.3f}")
        if first <= p.baseline:
            self.ui.warn(
                f"the start is no better than always proposing the most frequent token ({p.baseline:.1%}): it was made "
                "for another target, other aux layers, norms or rope, or was damaged"
            )

    def _validate(self) -> None:
        """Acceptance on held-out rows; keep the checkpoint if it is the best so far."""
        p = self.progress
        with self.core.whole() as model:
            found = acceptance(model, self.held_out(), self.section.ttt_steps, self.place.exchange)
            if found.length > p.best and self.ranks.first:
                write_native(self.folder / BEST, model, self.rms, self.contract)
        figures = found.as_dict()
        p.evaluated = p.steps
        if not self.progress.baseline:
            self.progress.baseline = unigram_acceptance(self.held_out(), self.core.model.t2d)
        self._log(figures)
        if found.length > p.best:
            p.best, p.best_step, p.best_figures, p.worse = found.length, p.steps, figures, 0
        else:
            p.worse += 1
            if self.section.patience and p.worse >= self.section.patience:
                p.finished = f"no better acceptance in {p.worse} validations"
        warm = p.packs >= self.schedule.warm_fraction * self.order.total
        if warm and p.steps >= JUDGE_AFTER and max(found.per_position[0], p.best - 1) <= self.progress.baseline:
            raise UserError(
                f"after {p.steps} steps the drafter's first token is right in {found.per_position[0]:.1%} of the drafts; "
                f"always proposing the most frequent token would be right in {self.progress.baseline:.1%}",
                "it has learned nothing from the states: their layers, alignment or norm are off, or the rate is",
                "verify the states (draftsmith states verify), then try another train.lr",
                code=Exit.NO,
            )

    # figures

    def _log_open(self) -> None:
        self._board = None
        if self.ranks.first:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.progress.steps + 1)

    def _log(self, figures: dict[str, Any]) -> None:
        if not self.ranks.first:
            return
        step = self.progress.steps
        with (self.folder / METRICS).open("a", encoding="utf-8") as f:
            f.write(json.dumps({"step": step, **figures}) + "\n")
        for key, value in figures.items():
            values = value if isinstance(value, list) else [value]
            for i, v in enumerate(values):
                if self._board is not None:
                    self._board.add_scalar(key if not isinstance(value, list) else f"{key}/{i}", v, step)

    def _log_close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self.ranks.first:
            write_json(self.folder / "progress.json", self.progress.__dict__)
