"""Finds the causes of low acceptance and puts the likeliest first.

Counterfactual replay: every family of hypotheses is tried on the sample; what it gains in nats per token, well beyond
its standard error, is its score. Disagreements read off the files or the data stand above, weak signs below.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from draftsmith.diagnose import signals
from draftsmith.diagnose.causes import Cause
from draftsmith.diagnose.hypotheses import FAMILIES
from draftsmith.diagnose.replay import Score, acceptance, base_acceptance, score
from draftsmith.diagnose.subject import Subject
from draftsmith.errors import UserError
from draftsmith.ui import Ui

MIN_GAIN = 0.02
"""Nats per token under which a better setting is noise, however small its error."""
SIGMAS = 4.0


def counterfactuals(subject: Subject, base: Score, ui: Ui) -> list[Cause]:
    """Families whose best variant beats the drafter as it is, best first."""
    setup = subject.setup()
    found: list[Cause] = []
    tries = [(f, list(f.variants(subject, setup))) for f in FAMILIES]
    with ui.task("what-ifs", sum(len(v) for _, v in tries), "settings") as task:
        for family, variants in tries:
            best: tuple[float, float, str, Any] | None = None
            for label, changed in variants:
                gain, error = score(changed, subject.rows).gain_over(base)
                task.advance(1, family.id)
                if best is None or gain > best[0]:
                    best = (gain, error, label, changed)
            if best and best[0] > max(MIN_GAIN, SIGMAS * best[1]):
                gain, error, label, changed = best
                found.append(
                    Cause(
                        family.id,
                        family.cause.format(v=label),
                        gain,
                        [f"with that change alone the target's own tokens gain {gain:.3f} ± {error:.3f} nats each"],
                        family.fix,
                        setup=changed if family.apply else None,
                    )
                )
    found.sort(key=lambda c: -c.score)
    before = base_acceptance(subject).length
    for cause in found[:3]:
        if cause.setup is not None:
            after = acceptance(cause.setup, subject.rows, subject.steps)
            cause.before, cause.after = round(before, 3), round(after.length, 3)
            cause.evidence.append(f"acceptance length {before:.2f} → {after.length:.2f} in replay")
    return found


def diagnose(subject: Subject, ui: Ui, engine: str | None = None) -> dict[str, Any]:
    """All causes, ranked: {"acceptance": {…}, "causes": [...], "verdict": "nothing wrong" | "likely cause found"}."""
    if not subject.rows:
        raise UserError(
            "no captured row is long enough to look at", "the diagnosis replays real answers", "give rows (--rows)"
        )
    base = score(subject.setup(), subject.rows)
    measured = base_acceptance(subject)
    causes = [*signals.check_rows(subject, engine), *signals.states_audit(subject, base)]
    causes += signals.template(subject, base)
    causes += counterfactuals(subject, base, ui)
    causes += signals.coverage(subject, base)
    causes += signals.by_position(subject, base, subject.rows, signals.nll_by_row(base, subject.rows))
    causes += signals.ttt(subject, measured.conditional)
    train = score(subject.setup(), list(subject.train_rows)) if subject.train_rows else None
    causes += signals.data_size(subject, base, train)
    causes += signals.slower(subject.bench)
    causes.sort(key=lambda c: -c.score)
    return {
        "acceptance": measured.as_dict(),
        "nats_per_token": round(base.mean, 4),
        "rows": len(subject.rows),
        "causes": [c.as_dict() for c in causes],
        "_causes": causes,
        "verdict": "likely cause found" if causes else "nothing wrong found",
    }


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
    contract = subject.contract.with_(aux_layer_ids=list(setup.aux_ids)) if subject.contract else None
    config = setup.config.model_copy(update={"aux_layer_ids": list(setup.aux_ids)})
    vllm.write(Checkpoint(config, setup.tensors, contract), out, dtype)


def load_bench(run_folder: Path | None) -> dict[str, Any] | None:
    """bench.json of a run, if it was measured."""
    path = run_folder / "bench" / "bench.json" if run_folder else None
    if path is None or not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else None


def quiet_threads() -> None:
    """Replay is many small products: more threads than cores would only wait."""
    torch.set_num_threads(min(torch.get_num_threads(), 8))
