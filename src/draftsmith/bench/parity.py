"""Parity replay: the exported files through the trainer's model and through the engine's own drafter class, on the same
tokens and states, compared step by step. The first disagreement is named, with its size and the likeliest switch.

Where no engine can be run, a second reading of the files (parity_plain.py) stands in for it: it finds what the files and
the trainer's model disagree on, not what a release of the engine does otherwise.
Stages, in the order in which one feeds the next: aux ids, embedding, fused, then for each draft step normed (of which
logits are made), state (which the next step sees), logits, proposals.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.diagnose.hypotheses import FAMILIES
from draftsmith.diagnose.subject import SampleRow, Setup, Subject
from draftsmith.drafter.model import Steps
from draftsmith.errors import Exit, UserError
from draftsmith.train.objective import shift

if TYPE_CHECKING:
    from draftsmith.engine.find import Engine

AGREES = 1e-4
"""Relative L2 within which float32 results agree (architecture.md, Words)."""
FOUND = 1e-3
"""Relative L2 under which a changed setting explains a disagreement."""
SECONDS = 600.0

WHERE = {
    "embedding": "embed_tokens: the drafter's own table or the target's",
    "fused": "fc.weight, its width, and the norms before it (norm_before_fc, fc_norm)",
    "normed": "norm.weight, or whatever the decoder layer does otherwise (rope, norms, heads, attention_bias)",
    "state": "the decoder layer (rope, norm_before_residual, heads, attention_bias), or norm_output",
    "logits": "lm_head.weight",
    "proposals": "d2t: target id = i + d2t[i]",
}
"""Stage → what it is made by, where no single switch explains the difference."""

ENGINE_SIDE = Path(__file__).with_name("parity_engine.py")
"""The program that the engine's own interpreter runs."""


@dataclass(frozen=True)
class Given:
    """One row as both sides get it. aux [T, A*G], embeddings [K, T, H] of the target's table, token_ids int64 [K, T]."""

    row: SampleRow
    tensors: dict[str, Tensor]

    @staticmethod
    def of(setup: Setup, row: SampleRow, steps: int) -> Given:
        batch = setup.batch(row)
        ids = torch.stack([shift(batch.token_ids, s + 1, 0) for s in range(steps)])
        tensors = {"aux": batch.aux, "position": batch.position, "token_ids": ids}
        # A drafter of another width has its own table, and what is given here is not looked at.
        return Given(row, tensors | {"embeddings": setup.embedding[ids].float()})


def ours(setup: Setup, given: Given) -> dict[str, Tensor]:
    """The trainer's model over `given`: "fused", and "embedding", "normed", "state", "logits", "proposals" by step."""
    model, batch = setup.module(), setup.batch(given.row)
    steps, out = Steps(spans=batch.spans), {}
    with torch.no_grad():
        state = out["fused"] = model.fuse(batch.aux)
        for s, ids in enumerate(given.tensors["token_ids"]):
            embedding = out[f"embedding.{s}"] = model.embed(ids)
            normed, state = model.step(state, embedding, batch.position + s, steps)
            logits = model.lm_head(normed)
            out |= {f"normed.{s}": normed, f"state.{s}": state, f"logits.{s}": logits}
            out[f"proposals.{s}"] = model.draft_to_target(logits.argmax(-1))
    return out


def engine_side(
    engine: Engine, target: Path, drafter: Path, given: Sequence[Given]
) -> tuple[list[dict[str, Tensor]], str]:
    """The engine's own class over every row, in one process of its interpreter; (outputs, name of the class)."""
    if engine.python is None or engine.name != "vllm":
        raise UserError(
            f"{engine.label} at {engine.site} cannot be run" if engine.python is None else f"{engine.label}: not vLLM",
            "parity runs the engine's own drafter class",
            "give the environment of a vLLM, or --engine none for a second reading of the files",
        )
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="draftsmith-parity-") as work:
        cases = []
        for i, one in enumerate(given):
            case = Path(work) / f"row{i}"
            case.mkdir()
            (case / "drafter").write_text(str(drafter.resolve()))
            save_file({n: t.contiguous().clone() for n, t in one.tensors.items()}, case / "in.safetensors")
            cases.append(case)
        command = [str(engine.python), str(ENGINE_SIDE), str(target), *map(str, cases)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=env)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"the engine's drafter class took more than {SECONDS:.0f} s", "", "give fewer rows", Exit.UNKNOWN
            ) from None
        if done.returncode != 0:
            from draftsmith.check.dryrun import last_error

            raise UserError(
                f"the engine's own class cannot load these files: {last_error(done.stderr)}",
                "a server would die of the same",
                "draftsmith check TARGET DRAFTER says what is wrong with them",
                Exit.NO,
            )
        name = done.stdout.split()[-1] if done.stdout.split() else "?"
        return [load_file(case / "out.safetensors") for case in cases], name


def plain_side(drafter: Path, given: Sequence[Given]) -> list[dict[str, Tensor]]:
    """The second reading of the files over every row."""
    from draftsmith.bench.parity_plain import PlainDrafter

    try:
        plain = PlainDrafter(drafter)
        return [plain.run(one.tensors) for one in given]
    except (KeyError, RuntimeError, OSError, ValueError) as e:
        raise UserError(
            f"{drafter}: the files cannot be read a second time: {type(e).__name__} {e}",
            "only the vLLM dialect is read without an engine",
            "draftsmith convert --to vllm, or give --engine",
        ) from None


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 of a against b; inf for other shapes. Of token ids: the share that differs."""
    if a.shape != b.shape:
        return float("inf")
    if not a.is_floating_point():
        return float((a != b).float().mean())
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-12))


def stages(theirs: dict[str, Tensor], steps: int) -> list[str]:
    """Names of the outputs in the order in which they are made."""
    order = ["fused"]
    for s in range(steps):
        order += [f"{stage}.{s}" for stage in ("embedding", "state", "normed", "logits", "proposals")]
    return [name for name in order if name in theirs]


def compare(mine: Sequence[dict[str, Tensor]], theirs: Sequence[dict[str, Tensor]], steps: int) -> list[dict[str, Any]]:
    """[{"stage", "step", "distance", "agrees"}] in order, the worst row of each."""
    rows = []
    for name in stages(theirs[0], steps):
        stage, _, step = name.partition(".")
        worst = max(distance(a[name], b[name]) for a, b in zip(mine, theirs, strict=True))
        # Two near-equal logits may change places by rounding: one in a hundred proposals is no disagreement.
        limit = 0.01 if stage == "proposals" else AGREES
        rows.append({"stage": stage, "step": int(step) if step else None, "distance": worst, "agrees": worst <= limit})
    return rows


def suspects(
    subject: Subject, setup: Setup, given: Sequence[Given], theirs: Sequence[dict[str, Tensor]], name: str, now: float
) -> list[dict[str, Any]]:
    """Settings with which the trainer's model would do what the other side did at `name`, nearest first: the what-ifs of
    diagnose, judged by the distance of that one output."""
    found: list[dict[str, Any]] = []
    for family in FAMILIES:
        for label, changed in family.variants(subject, setup):
            try:
                mine = ours(changed, given[0])
            except (RuntimeError, ValueError, IndexError):  # a variant that does not fit these rows explains nothing
                continue
            far = distance(mine[name], theirs[0][name]) if name in mine else float("inf")
            if far < min(0.5 * now, 0.1):
                found.append({"id": family.id, "what": family.cause.format(v=label), "distance": far})
    found.sort(key=lambda f: float(f["distance"]))
    return found


def parity(
    subject: Subject, rows: Sequence[SampleRow], steps: int, engine: Engine | None, trained: Setup | None = None
) -> dict[str, Any]:
    """The comparison as JSON: {"engine", "class", "rows", "tokens", "stages": […], "first": … | None, "suspects": […]}.

    trained: the trainer's own checkpoint in place of what the exported files are read as."""
    setup = trained or subject.setup()
    served = _served_ids(subject)
    used = subject.setup() if served is None else _with_ids(subject.setup(), served)
    given = [Given.of(used, row, steps) for row in rows]
    mine = [ours(setup, one) for one in given]
    if engine is None:
        theirs, class_name = plain_side(subject.drafter, given), "second reading of the files"
    else:
        theirs, class_name = engine_side(engine, subject.target, subject.drafter, given)
    table = compare(mine, theirs, steps)
    found: dict[str, Any] = {
        "engine": engine.label if engine else None,
        "class": class_name,
        "rows": len(rows),
        "tokens": sum(r.tokens for r in rows),
        "aux_layer_ids": {"trainer": list(setup.aux_ids), "engine": list(used.aux_ids)},
        "stages": table,
        "first": None,
        "suspects": [],
    }
    if setup.aux_ids != used.aux_ids:
        text = f"the trainer's aux layers are {list(setup.aux_ids)}, the engine takes {list(used.aux_ids)}"
        found["first"] = {"stage": "aux ids", "step": None, "distance": None, "where": text}
        return found
    first = next((r for r in table if not r["agrees"]), None)
    if first is not None:
        name = first["stage"] if first["step"] is None else f"{first['stage']}.{first['step']}"
        found["first"] = first | {"where": WHERE[first["stage"]]}
        found["suspects"] = suspects(subject, setup, given, theirs, name, first["distance"])
    return found


def _served_ids(subject: Subject) -> tuple[int, ...] | None:
    from draftsmith.diagnose.load import served_ids

    return served_ids(subject.target, subject.drafter, subject.facts) if subject.facts else None


def _with_ids(setup: Setup, ids: tuple[int, ...]) -> Setup:
    changed = setup.with_config(aux_layer_ids=list(ids))
    return Setup(changed.config, changed.tensors, ids, tuple(range(len(ids))), changed.embedding)
