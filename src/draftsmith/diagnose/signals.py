"""Causes that no changed setting would mend: the data, the target, the text, the training. Each is measured on the sample.

Every function yields Causes or nothing; `score` is on the scale of rank.py: nats per token that the fault costs, as far
as it can be told, so that a proven disagreement of the data stands above a mild statistical sign.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.diagnose.causes import Cause
from draftsmith.diagnose.replay import Score
from draftsmith.diagnose.subject import SampleRow, Subject
from draftsmith.drafter.model import rms_norm
from draftsmith.errors import UserError

AGREES = 2e-2
"""Relative L2 within which bf16 streams agree (architecture.md, Words)."""
PROVEN = 6.0
"""Score of a disagreement that was read off the data itself: more nats than any mistaken setting gains."""


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def states_audit(subject: Subject, base: Score) -> Iterator[Cause]:
    """The stored states against the target's own, stream by stream: layer, norm, position, or another revision."""
    if subject.states_folder is None:
        return
    from draftsmith.extract.store import StateStore
    from draftsmith.target.config import load_config, text_config
    from draftsmith.target.weights import read_final_norm

    store = StateStore.open(subject.states_folder)
    known = {e.row_id: e for e in store.index}
    norm, eps = (
        read_final_norm(subject.target).float(),
        float(text_config(load_config(subject.target)).get("rms_norm_eps", 1e-5)),
    )
    n = subject.num_layers
    ids = sorted(store.contract.aux_layer_ids or [])
    found: Counter[str] = Counter()
    looked = 0
    for row in [*subject.train_rows, *subject.rows]:
        if row.row_id not in known or looked >= 4:
            continue
        looked += 1
        states = store.read(row.row_id)
        T = min(states.tokens, row.tokens)
        names = {f"stream {k}": row.streams[k, :T] for k in range(n + 1)}
        names |= {f"stream {n}, final norm applied": rms_norm(row.streams[n, :T], norm, eps)}
        names |= {f"stream {n}, final norm applied twice": rms_norm(rms_norm(row.streams[n, :T], norm, eps), norm, eps)}
        for b, k in enumerate(ids):
            found[_identify(states.aux[:T, b].float(), names, f"aux block {b}", f"stream {k}")] += 1
        if states.final is not None:
            s = states.final_start
            cut = {name: x[s:T] for name, x in names.items()}
            found[_identify(states.final[: T - s].float(), cut, "the final state", f"stream {n}")] += 1
    for text, count in found.most_common():
        if text and count >= max(1, looked // 2):
            revision = "no stream of this target" in text
            yield Cause(
                "data.revision" if revision else "data.states",
                "the states were made by another target (revision, quantisation, rotation) than is served"
                if revision
                else f"the training states are not what their contract says: {text}",
                PROVEN,
                [f"{text} ({count} of {looked} rows compared with the target's own forward)"],
                "extract the states again from the target that is served, and train again",
            )
            return


def _identify(x: Tensor, names: dict[str, Tensor], what: str, expected: str) -> str:
    """ "" if x is the expected stream, else a sentence that names what it is."""
    if _distance(x, names[expected]) <= AGREES:
        return ""
    distances = {name: _distance(x, y) for name, y in names.items()}
    best = min(distances, key=lambda k: distances[k])
    if distances[best] <= AGREES:
        return f"{what} holds {best}, not {expected}"
    for shift in (-1, 1):
        y = names[expected]
        a, b = (x[1:], y[:-1]) if shift == 1 else (x[:-1], y[1:])
        if _distance(a, b) <= AGREES:
            return f"{what} is {expected} one position {'late' if shift == 1 else 'early'}"
    return (
        f"{what} is no stream of this target (nearest {best}, relative L2 {distances[best]:.2f}, expected {expected})"
    )


def _script(text: str) -> str:
    """The writing system of most letters: LATIN, CYRILLIC, CJK, …; "other" where there are no letters."""
    counts: Counter[str] = Counter()
    for ch in text:
        if ch.isalpha():
            counts[unicodedata.name(ch, "UNKNOWN").split(" ")[0]] += 1
    return counts.most_common(1)[0][0] if counts else "other"


def coverage(subject: Subject, base: Score) -> Iterator[Cause]:
    """Share of the target's choices that the draft vocab holds, in all and by script of the answer."""
    t2d = subject.checkpoint.tensors["t2d"]
    from draftsmith.target.tokenizer import TargetTokenizer

    try:
        decode: Callable[[list[int]], str] | None = TargetTokenizer.load(subject.target).decode
    except UserError:  # a tokenizer that cannot be loaded only costs the split by script
        decode = None
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
    worst = min(by.items(), key=lambda kv: kv[1][0] / max(kv[1][1], 1)) if by else None
    low = [f"{s}: {h / a:.1%} of {a:,} tokens" for s, (h, a) in by.items() if a >= 50 and h / a < 0.85]
    if share < 0.88 or (low and worst):
        missed = 1 - (share if not low else min(h / a for h, a in by.values() if a >= 50))
        yield Cause(
            "vocab.coverage",
            f"the draft vocab leaves out {1 - share:.0%} of what the target says"
            + (f" (worst: {'; '.join(low)})" if low else ""),
            missed * 20.0,
            [f"{inside:,} of {total:,} choices can be drafted", *low],
            "capture answers of this kind, choose the draft vocab from them (larger, if need be), and train again",
        )


def template(subject: Subject, base: Score) -> Iterator[Cause]:
    """Do the training prompts begin and end as the served template makes them? Compared as token ids."""
    if not subject.train_rows:
        return
    from draftsmith.target.tokenizer import TargetTokenizer

    try:
        tokenizer = TargetTokenizer.load(subject.target)
    except UserError:  # no tokenizer, nothing to compare with
        return
    if not tokenizer.has_template:
        return
    word = "zebra"
    thinking = subject.contract.thinking if subject.contract else "default"
    ids = tokenizer.render([{"role": "user", "content": word}], thinking or "default")  # type: ignore[arg-type]
    at = next((i for i in range(len(ids)) if word.startswith(tokenizer.decode([ids[i]]).strip() or "\0")), len(ids))
    end = next((i for i in range(len(ids), at, -1) if word not in tokenizer.decode(ids[i - 1 :])), len(ids))
    head, tail = ids[:at], ids[end:]
    prompts = [r.token_ids[: r.boundary] for r in subject.train_rows]
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


def by_position(
    subject: Subject, base: Score, rows: list[SampleRow], per_row: list[tuple[int, Tensor]]
) -> Iterator[Cause]:
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


def ttt(subject: Subject, conditional: list[float]) -> Iterator[Cause]:
    """Conditional acceptance that collapses at some step: trained with fewer draft steps than are served."""
    trained = subject.contract.ttt_steps if subject.contract else None
    for i in range(1, len(conditional)):
        before, here = conditional[i - 1], conditional[i]
        if before >= 0.2 and here < 0.35 * before and (trained is None or trained <= i):
            yield Cause(
                "train.ttt",
                f"conditional acceptance falls from {before:.2f} at position {i - 1} to {here:.2f} at position {i}",
                (before - here) * 2,
                [f"trained with {trained or 'an unknown number of'} draft steps, served with {len(conditional)}"],
                f"train with ttt_steps {len(conditional)}, or serve with {i} speculative tokens",
            )
            return


def data_size(subject: Subject, base: Score, train_score: Score | None) -> Iterator[Cause]:
    """Much better on what was trained than on what was not: too little data."""
    if train_score is None:
        return
    gap = base.mean - train_score.mean
    if gap > 0.8 and train_score.mean < 0.75 * base.mean:
        yield Cause(
            "data.little",
            "the drafter knows its training rows far better than new ones: too little data",
            gap,
            [f"{train_score.mean:.2f} nats per token on trained rows, {base.mean:.2f} on rows not trained on"],
            "capture more answers (thousands of prompts, at least 100,000 answer tokens even for a small target)",
        )


def check_rows(subject: Subject, engine: str | None) -> Iterator[Cause]:
    """What the static check already fails: causes by contradiction of the files alone."""
    from draftsmith.check.run import check_pair
    from draftsmith.check.types import Options

    verdict = check_pair(str(subject.target), str(subject.drafter), engine, Options(method="eagle3", deep=True))
    for row in verdict.checks:
        # A known engine fault shows at temperature > 0 only (known_faults): no cause of what greedy replay measures.
        faulty = row.status == "warn" and row.id == "engine.faults" and (subject.bench or {}).get("temperature")
        if row.status == "fail" or faulty:
            failed = row.status == "fail"
            yield Cause(
                f"check.{row.id}",
                row.found,
                PROVEN + 2 if failed else 0.2,
                [f"{e.file}:{e.line}: {e.text.strip()}" for e in row.evidence][:4],
                row.fix or "see draftsmith check",
            )


def slower(bench: dict[str, object] | None) -> Iterator[Cause]:
    """Accepted well and slower all the same: the draft steps cost more than they save."""
    if not bench:
        return
    speeds = bench.get("tokens_per_second")
    per_step = bench.get("tokens_per_target_step")
    if not isinstance(speeds, dict) or not isinstance(per_step, int | float) or per_step < 1.3:
        return
    plain, ours = speeds.get("none") or {}, speeds.get("drafter") or {}
    ratios = {c: ours[c] / plain[c] for c in plain if plain.get(c) and ours.get(c)}
    if ratios and max(ratios.values()) < 1.0:
        yield Cause(
            "speed.cost",
            f"acceptance is fine ({per_step:.2f} tokens per target step) but each draft step costs more than it saves",
            0.1,
            [f"{r:.2f}× the speed of no drafter at {c} at once" for c, r in ratios.items()],
            "fewer speculative tokens, a smaller batch, or no drafter for a target this small",
        )


def rows_from_store(folder: Path, limit: int) -> list[str]:
    """Row ids of a store, evenly spread."""
    from draftsmith.extract.store import StateStore

    index = StateStore.open(folder).index
    step = max(len(index) // max(limit, 1), 1)
    return [e.row_id for e in index[::step][:limit]]


def nll_by_row(score: Score, rows: list[SampleRow]) -> list[tuple[int, Tensor]]:
    """(position of the first score, nats of step 0) per row; score parts come step after step for each row."""
    out = []
    for i, row in enumerate(rows):
        nll = score.nll[score.row == i]
        first = row.boundary - 2
        count = max(row.tokens - 2 - max(first, 0), 0)
        out.append((max(first, 0), nll[: min(count, torch.numel(nll))]))
    return out
