"""Causes that no changed setting would mend: the data, the target, the text, the training. Each is measured on the sample.

Every function yields Causes or nothing; `score` is on the scale of rank.py: nats per token that the fault costs, as far
as it can be told, so that a proven disagreement of the data stands above a mild statistical sign.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftsmith.diagnose.audit import PROVEN
from draftsmith.diagnose.causes import Cause
from draftsmith.diagnose.replay import Replayer, Score
from draftsmith.diagnose.subject import SampleRow, Setup, Subject
from draftsmith.errors import UserError
from draftsmith.target.tokenizer import common_length
from draftsmith.train.validate import Acceptance

if TYPE_CHECKING:
    from draftsmith.target.tokenizer import TargetTokenizer


def _script(text: str) -> str:
    """The writing system of most letters: LATIN, CYRILLIC, CJK, …; "other" where there are no letters."""
    counts: Counter[str] = Counter()
    for ch in text:
        if ch.isalpha():
            counts[unicodedata.name(ch, "UNKNOWN").split(" ")[0]] += 1
    return counts.most_common(1)[0][0] if counts else "other"


def _tokenizer(subject: Subject) -> TargetTokenizer | None:
    """The target's tokenizer, loaded once for a target; None where there is none that loads."""
    from draftsmith.target.tokenizer import TargetTokenizer

    if subject.target not in _TOKENIZERS:
        try:
            found = TargetTokenizer.load(subject.target)
        except UserError:
            return None
        _TOKENIZERS.clear()
        _TOKENIZERS[subject.target] = found
    return _TOKENIZERS[subject.target]


_TOKENIZERS: dict[Path, TargetTokenizer] = {}


def coverage(subject: Subject, setup: Setup) -> Iterator[Cause]:
    """Share of the target's choices that the draft vocab holds, in all and by script of the answer."""
    t2d = setup.tensors["t2d"]
    tokenizer = _tokenizer(subject)
    # a tokenizer that cannot be loaded only costs the split by script
    decode: Callable[[list[int]], str] | None = tokenizer.decode if tokenizer else None
    total, inside = 0, 0
    by: dict[str, list[int]] = {}
    for row in subject.rows:
        choices = row.argmax[row.boundary - 1 : -1]
        hit, all_ = int(t2d[choices].sum()), int(choices.numel())
        total, inside = total + all_, inside + hit
        script = _script(decode(row.token_ids[row.boundary :])) if decode else "all"
        seen = by.setdefault(script, [0, 0])
        seen[0], seen[1] = seen[0] + hit, seen[1] + all_
    share = inside / max(total, 1)
    # Of few tokens a share is known within its error only (half as large again: neighbours are alike).
    error = 1.5 * (share * (1 - share) / max(total, 1)) ** 0.5
    worst = min(by.items(), key=lambda kv: kv[1][0] / max(kv[1][1], 1)) if by else None
    low = [f"{s}: {h / a:.1%} of {a:,} tokens" for s, (h, a) in by.items() if a >= 50 and h / a < 0.85]
    if share + 2 * error < 0.88 or (low and worst):
        missed = 1 - (share if not low else min(h / a for h, a in by.values() if a >= 50))
        yield Cause(
            "vocab.coverage",
            f"the draft vocab leaves out {1 - share:.0%} of what the target says"
            + (f" (worst: {'; '.join(low)})" if low else ""),
            missed * 20.0,
            [f"{inside:,} of {total:,} choices can be drafted", *low],
            "capture answers of this kind, choose the draft vocab from them (larger, if need be), and train again",
        )


WORDS = ("zebra", "What is 7 + 5?", "1", "Über uns")
"""Questions that have nothing in common: what their renderings share is the template's."""


def _common(lists: list[list[int]]) -> list[int]:
    """The longest beginning that all share."""
    return lists[0][: min(common_length(lists[0], other) for other in lists)]


def template(subject: Subject) -> Iterator[Cause]:
    """Do the training prompts begin and end as the served template makes them? Compared as token ids."""
    prompts = subject.prompts or [r.token_ids[: r.boundary] for r in subject.train_rows]
    if not prompts:
        return
    tokenizer = _tokenizer(subject)
    if tokenizer is None or not tokenizer.has_template:
        return
    thinking = subject.contract.thinking if subject.contract else "default"
    asked = [tokenizer.render([{"role": "user", "content": w}], thinking or "default") for w in WORDS]  # type: ignore[arg-type]
    head, tail = _common(asked), _common([ids[::-1] for ids in asked])[::-1]
    bad_head = sum(p[: len(head)] != head for p in prompts)
    bad_tail = sum(p[len(p) - len(tail) :] != tail for p in prompts) if tail else 0
    for what, bad, want, got in (
        ("begin", bad_head, head, prompts[0][: len(head) + 12]),
        ("end", bad_tail, tail, prompts[0][max(len(prompts[0]) - len(tail) - 6, 0) :]),
    ):
        if bad > len(prompts) / 2:
            yield Cause(
                "data.template",
                f"training prompts {what} otherwise than the served template makes them",
                PROVEN - 1,
                [
                    f"{bad} of {len(prompts)} rows",
                    f"served: {tokenizer.decode(want)!r}",
                    f"trained: {tokenizer.decode(got)!r}",
                ],
                "capture with the template, system prompt and thinking mode that will be served, and train again",
            )
            return


def by_position(subject: Subject, rows: list[SampleRow], per_row: list[tuple[int, Tensor]]) -> Iterator[Cause]:
    """Nats by context position: does it get worse beyond the length that was trained?"""
    trained = subject.contract.trained_length if subject.contract else None
    near: list[float] = []
    far: list[float] = []
    longest = max((r.tokens for r in rows), default=0)
    edge = trained or longest // 2
    for start, nll in per_row:
        for i, value in enumerate(nll.tolist()):
            (near if start + i < edge else far).append(value)
    if len(near) < 50 or len(far) < 50:
        return
    a, b = sum(near) / len(near), sum(far) / len(far)
    if b - a > 1.0:
        yield Cause(
            "context.length",
            f"drafting falls off beyond {edge:,} tokens of context" + (" (the trained length)" if trained else ""),
            (b - a) * len(far) / (len(near) + len(far)),
            [f"{a:.2f} nats per token up to there, {b:.2f} beyond ({len(far):,} tokens)"],
            "train on rows as long as those that are served; rope scaling alone does not teach long context",
        )


COLLAPSE = 1.5
"""Nats that a draft step may lose against the step before it on the same text; drafters trained over the step lose less."""


def ttt(subject: Subject, setup: Setup) -> Iterator[Cause]:
    """A draft step that is far worse than the one before it: trained with fewer draft steps than are served.

    Compared are the nats of all positions, step by step: conditional acceptance says the same, but of few drafts."""
    steps = max(subject.steps, 2)
    found = Replayer(subject.rows, steps).score(setup)
    means = [float(part.mean()) for part in _by_step(found, steps)]
    for i in range(1, steps):
        if means[i] - means[i - 1] > COLLAPSE:
            trained = subject.contract.ttt_steps if subject.contract else None
            yield Cause(
                "train.ttt",
                f"drafting falls off at draft position {i}, which the drafter feeds itself",
                (means[i] - means[i - 1]) / 2,
                [
                    f"nats per token by draft position: {' '.join(f'{m:.2f}' for m in means)}",
                    f"trained with {trained or 'an unknown number of'} draft steps, served with {subject.steps}",
                ],
                f"train with ttt_steps {subject.steps}, or serve with {i} speculative token{'s' if i > 1 else ''}",
            )
            return


def _by_step(found: Score, steps: int) -> list[Tensor]:
    """The nats of each draft step: a step ends where the row numbers begin again."""
    starts = [0, *(torch.nonzero(found.row[1:] < found.row[:-1]).flatten() + 1).tolist(), len(found.row)]
    if len(starts) != steps + 1:  # a single row does not show where a step ends
        return list(found.nll.tensor_split(steps))
    return [found.nll[a:b] for a, b in pairwise(starts)]


FEW = 50_000
"""Answer tokens under which a gap between trained and new rows is taken for want of data at once: of a 135M target that
captured 91,000, a drafter that is as good as its data allows has a gap of 1.5 nats (2.3 against 3.8)."""


def data_size(subject: Subject, base: Score, train_score: Score | None) -> Iterator[Cause]:
    """Far better on what was trained than on what was not: too little data. How far is too far depends on how much there
    is, since every drafter that sees its rows several times knows them better than others."""
    if train_score is None:
        return
    gap = base.mean - train_score.mean
    few = 0 < subject.answer_tokens < FEW
    if gap > (0.8 if few else 2.0) and train_score.mean < (0.75 if few else 0.4) * base.mean:
        have = f"{subject.answer_tokens:,} answer tokens were captured" if subject.answer_tokens else ""
        yield Cause(
            "data.little",
            "the drafter knows its training rows far better than new ones: too little data",
            gap,
            [
                f"{train_score.mean:.2f} nats per token on trained rows, {base.mean:.2f} on rows not trained on",
                *([have] if have else []),
            ],
            "capture more answers (thousands of prompts, at least 100,000 answer tokens even for a small target)",
        )


def check_rows(subject: Subject, measured: Acceptance | None = None) -> Iterator[Cause]:
    """What the static check already fails: causes by contradiction of the files alone; and a known fault of the engine,
    where the bench was measured under its condition."""
    from draftsmith.check.run import check_pair
    from draftsmith.check.types import Options
    from draftsmith.engine.faults import spoils

    options = Options(method="eagle3", deep=True)
    verdict = check_pair(str(subject.target), str(subject.drafter), None, options, facts=subject.facts)
    for row in verdict.checks:
        evidence = [f"{e.file}:{e.line}: {e.text.strip()}" for e in row.evidence][:4]
        fix = row.fix or "see draftsmith check"
        if row.status == "fail":
            mended = subject.setup() if subject.checkpoint is not None and row.id.startswith("form.map") else None
            yield Cause(f"check.{row.id}", row.found, PROVEN + 2, evidence, fix, setup=mended)
        elif row.id == "engine.faults" and _meets(spoils(row.found), subject.bench):
            # Replay does not see them, the bench does.
            lost = _lost(subject.bench, measured)
            evidence += [lost] if lost else []
            yield Cause(f"check.{row.id}", row.found, PROVEN + 1 if lost else 0.2, evidence, fix)


def _meets(spoiled: str, bench: dict[str, Any] | None) -> bool:
    """Whether a bench ran under a known fault's condition."""
    return spoiled == "always" or (spoiled == "sampling" and _temperature(bench) > 0)


def _temperature(bench: dict[str, Any] | None) -> float:
    return float(((bench or {}).get("settings") or {}).get("temperature") or 0.0)


def _lost(bench: dict[str, Any] | None, measured: Acceptance | None) -> str | None:
    """A sentence where the engine accepted far less at position 0 than replay says it should; else None."""
    rates = (bench or {}).get("acceptance_per_position") or []
    if not rates or measured is None:
        return None
    predicted = ((bench or {}).get("predicted") or {}).get("acceptance_per_position") or []
    # On the very same texts a few hundredths are a disagreement; on other texts the kind of text plays its part.
    same = bool(predicted) and _temperature(bench) == 0
    expected, floor = (predicted[0], predicted[0] - 0.05) if same else (measured.per_position[0],) * 2
    if rates[0] >= floor * (1.0 if same else 0.6):
        return None
    return f"position 0: {rates[0]:.3f} accepted in the engine, {expected:.3f} in replay of the same files"


def measured_elsewhere(subject: Subject, measured: Acceptance) -> Iterator[Cause]:
    """Replay drafts well and the engine did not: what differs is not in these files."""
    lost = _lost(subject.bench, measured)
    if lost:
        yield Cause(
            "engine.differs",
            "the engine accepts less than the same files do in replay: it serves something else, or computes otherwise",
            1.0,
            [lost],
            "draftsmith parity compares the engine's own drafter class step by step; look also whether the served folder, "
            "template and sampling are these",
        )


SLOWER = 0.97
"""Speed against no drafter under which a bench says more than its own noise."""


def slower(bench: dict[str, Any] | None) -> Iterator[Cause]:
    """Accepted well and slower all the same: the draft steps cost more than they save, which the cost model explains."""
    if not bench:
        return
    speeds, per_step = bench.get("tokens_per_second"), bench.get("tokens_per_target_step")
    if not isinstance(speeds, dict) or not isinstance(per_step, int | float) or per_step < 1.3:
        return
    from draftsmith.bench.forecast import lead_of, why_slower

    plain, ours = speeds.get("none") or {}, speeds.get(lead_of(bench)) or {}
    ratios = {c: ours[c] / plain[c] for c in plain if plain.get(c) and ours.get(c)}
    losing = [c for c, ratio in ratios.items() if ratio < SLOWER]
    if losing:
        evidence, advice = why_slower(bench)
        where = "" if len(losing) == len(ratios) else f" at {', '.join(losing)} at once"
        yield Cause(
            "speed.cost",
            f"acceptance is fine ({per_step:.2f} tokens per target step) but{where} drafting costs more than it saves",
            0.1,
            evidence,
            advice,
        )


def nll_by_row(score: Score, rows: list[SampleRow]) -> list[tuple[int, Tensor]]:
    """(position of the first score, nats of step 0) per row; score parts come step after step for each row."""
    out = []
    for i, row in enumerate(rows):
        nll = score.nll[score.row == i]
        first = row.boundary - 2
        count = max(row.tokens - 2 - max(first, 0), 0)
        out.append((max(first, 0), nll[: min(count, torch.numel(nll))]))
    return out
