"""Finds the causes of low acceptance and puts the likeliest first.

Counterfactual replay: every family of hypotheses is tried on the sample; what it gains in nats per token, well beyond
its standard error, is its score. Disagreements read off the files or the data stand above, weak signs below.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from draftsmith.diagnose import audit, signals, weak
from draftsmith.diagnose.causes import Cause
from draftsmith.diagnose.hypotheses import FAMILIES, Family
from draftsmith.diagnose.replay import Replayer, Score, acceptance, base_acceptance, score, shortened
from draftsmith.diagnose.subject import Setup, Subject
from draftsmith.errors import UserError
from draftsmith.ui import Ui

MIN_GAIN = 0.02
"""Nats per token under which a better setting is noise, however small its error."""
SIGMAS = 4.0
SCREEN_ROWS, SCREEN_ANSWER, FINALISTS = 3, 40, 7
"""Every variant is first tried on so many rows, cut to so many answer tokens; so many of all go on to the whole sample."""
STEPS_ON = 6
"""Times that the best variant of a family may be bettered by its `further` step."""


def counterfactuals(subject: Subject, base: Score, ui: Ui) -> list[Cause]:
    """Families whose best variant beats the drafter as it is, best first."""
    setup = subject.setup()
    some = shortened(subject.rows, SCREEN_ROWS, SCREEN_ANSWER)
    screens = {steps: Replayer(some, steps) for steps in {f.steps for f in FAMILIES}}
    screened = {steps: screen.score(setup) for steps, screen in screens.items()}
    likely: list[tuple[float, Family, str, Setup]] = []
    tries = [(f, list(f.variants(subject, setup))) for f in FAMILIES]
    with ui.task("what-ifs", sum(len(v) for _, v in tries), "settings") as task:
        for family, variants in tries:
            for label, changed in variants:
                gain, error = screens[family.steps].score(changed).gain_over(screened[family.steps])
                task.advance(1, family.id)
                if gain + 2 * error > MIN_GAIN:
                    likely.append((gain, family, label, changed))
    likely.sort(key=lambda x: -x[0])
    whole = Replayer(subject.rows)
    bests: dict[str, tuple[Family, Best]] = {}
    for _, family, label, changed in likely[:FINALISTS]:
        gain, error = whole.score(changed).gain_over(base)
        if family.id not in bests or gain > bests[family.id][1][0]:
            bests[family.id] = (family, (gain, error, label, changed))
    found: list[Cause] = []
    for family, best in bests.values():
        if best[0] > max(MIN_GAIN, SIGMAS * best[1]):
            reached = _further(family, subject, whole, base, best)
            found.append(_cause(_named(family, setup, reached[3]), *reached))
    found = _distinct(found)
    before = base_acceptance(subject).length
    for cause in found[:3]:
        if cause.setup is not None:
            after = acceptance(cause.setup, subject.rows, subject.steps)
            cause.before, cause.after = round(before, 3), round(after.length, 3)
            cause.evidence.append(f"acceptance length {before:.2f} → {after.length:.2f} in replay")
    return found


Best = tuple[float, float, str, Setup]


def _further(family: Family, subject: Subject, whole: Replayer, base: Score, best: Best) -> Best:
    """From the best variant on, as long as the family's next step gains more. Neighbouring streams are alike: only the
    whole sample tells them apart."""
    if family.further is None:
        return best
    for _ in range(STEPS_ON):
        steps = [(*whole.score(s).gain_over(base), n, s) for n, s in family.further(subject, best[3])]
        better = max(steps, key=lambda x: x[0], default=None)
        if better is None or better[0] <= best[0]:
            break
        best = better
    return best


def _named(family: Family, before: Setup, after: Setup) -> Family:
    """The family that says what was changed: steps on from one aux id may have moved several, and the reverse."""
    moved = sum(a != b for a, b in zip(before.aux_ids, after.aux_ids, strict=True))
    if not moved:
        return family
    return next(f for f in FAMILIES if f.id == ("aux.one" if moved == 1 else "aux.all"))


def _distinct(causes: list[Cause]) -> list[Cause]:
    """Likeliest first, none twice: what several families come to is told once, in the words of the first of them."""
    order = [f.id for f in FAMILIES]
    causes.sort(key=lambda c: (-c.score, order.index(c.id)))
    kept: list[Cause] = []
    for cause in causes:
        if not any(_same(cause.supposed, k.supposed) for k in kept):
            kept.append(cause)
    return kept


def _same(a: Setup | None, b: Setup | None) -> bool:
    if a is None or b is None or (a.config, a.aux_ids, a.blocks) != (b.config, b.aux_ids, b.blocks):
        return False
    return all(a.tensors[n] is b.tensors[n] or torch.equal(a.tensors[n], b.tensors[n]) for n in a.tensors)


def _cause(family: Family, gain: float, error: float, label: str, changed: Setup) -> Cause:
    return Cause(
        family.id,
        family.cause.format(v=label),
        gain,
        [f"with that change alone the target's own tokens gain {gain:.3f} ± {error:.3f} nats each"],
        family.fix,
        setup=changed if family.apply else None,
        supposed=changed,
    )


def diagnose(subject: Subject, ui: Ui) -> dict[str, Any]:
    """All causes, ranked: {"acceptance": {…}, "causes": [...], "verdict": "nothing wrong found" | "likely cause found" |
    "only weak signs found"}."""
    if not subject.rows:
        raise UserError(
            "no captured row is long enough to look at", "the diagnosis replays real answers", "give rows (--rows)"
        )
    base = score(subject.setup(), subject.rows)
    measured = base_acceptance(subject)
    causes = [*signals.check_rows(subject, measured), *audit.states_audit(subject)]
    causes += signals.template(subject)
    supposed = counterfactuals(subject, base, ui)
    causes += supposed
    # What a wrong setting does to coverage or to later steps is no cause of its own: these are looked for in the drafter as
    # the likeliest setting would have it.
    setup = supposed[0].supposed if supposed else None
    rest = base if setup is None else score(setup, subject.rows)
    setup = setup or subject.setup()
    causes += signals.coverage(subject, setup)
    causes += signals.by_position(subject, subject.rows, signals.nll_by_row(rest, subject.rows))
    causes += signals.ttt(subject, setup)
    train = score(setup, list(subject.train_rows)) if subject.train_rows else None
    causes += signals.data_size(subject, rest, train)
    causes += signals.measured_elsewhere(subject, measured)
    causes += signals.slower(subject.bench)
    if not any(c.id == "rope" for c in causes):
        causes += weak.rope_unlike(subject, Replayer(subject.rows), base)
    if not any(c.id == "context.length" for c in causes):
        causes += weak.past_its_positions(subject)
    causes.sort(key=lambda c: -c.score)
    return {
        "acceptance": measured.as_dict(),
        "nats_per_token": round(base.mean, 4),
        "rows": len(subject.rows),
        "causes": [c.as_dict() for c in causes],
        "_causes": causes,
        "verdict": verdict(causes),
    }


def verdict(causes: list[Cause]) -> str:
    """The finding in a few words. causes: likeliest first."""
    if not causes:
        return "nothing wrong found"
    return "likely cause found" if causes[0].score > weak.WEAK else "only weak signs found"


def apply(cause: Cause, subject: Subject, out: Path) -> None:
    """Write the mended drafter of a counterfactual cause into `out` (vLLM dialect)."""
    from draftsmith.dialects import vllm
    from draftsmith.dialects.checkpoint import Checkpoint

    if cause.setup is None:
        raise UserError(f"{cause.id} cannot be mended in the drafter's files", cause.cause, cause.fix)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty", "", "give a new folder")
    setup = cause.setup
    dtype = str(next(t for n, t in setup.tensors.items() if n == "fc.weight").dtype).removeprefix("torch.")
    config = setup.config.model_copy(update={"aux_layer_ids": list(setup.aux_ids)})
    contract = None
    if subject.contract is not None:
        # What the files now say is what replay found true; a map that was changed has no hash yet.
        mapped = setup.tensors["d2t"] is not subject.checkpoint.tensors["d2t"]
        contract = subject.contract.with_(
            aux_layer_ids=list(setup.aux_ids),
            norms=config.norms.model_dump(),
            rope=config.rope,
            vocab_map_hash=None if mapped else subject.contract.vocab_map_hash,
        )
    vllm.write(Checkpoint(config, setup.tensors, contract), out, dtype)


def load_bench(run_folder: Path | None) -> dict[str, Any] | None:
    """bench.json of a run, if it was measured."""
    path = run_folder / "bench" / "bench.json" if run_folder else None
    if path is None or not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else None
