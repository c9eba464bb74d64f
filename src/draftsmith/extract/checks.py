"""The self-check as the stage runs it: which rows, which reference, both comparisons."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.extract.head import WeightsHead
from draftsmith.extract.rows import Item
from draftsmith.extract.self_check import (
    AGREES_BF16,
    Reference,
    Report,
    check_aux,
    check_final,
    load_references,
    relative_l2,
    require,
)
from draftsmith.extract.source import TransformersBackend
from draftsmith.extract.states import States
from draftsmith.extract.store import StateStore
from draftsmith.extract.transformers_backend import TransformersStates
from draftsmith.stage import Run
from draftsmith.target.resolve import resolve_target

SHORT = 512
"""Tokens of a row that are checked: enough positions, little time."""


def free_memory() -> int:
    """Bytes of memory that are available now."""
    import psutil

    return int(psutil.virtual_memory().available)


def choose_references(run: Run, model: TransformersStates | WeightsHead) -> list[Reference]:
    """Rows to check with what the target says there: the engine's prompt logprobs if capture left them; else the
    tokens of answers given at temperature 0; else transformers' own most likely tokens (source says which)."""
    from draftsmith.capture.rows import iter_rows

    section = run.recipe.extract
    count, length = section.self_check_rows, min(section.max_length, SHORT)

    kept = [r for r in load_references(run.stage_dir("capture")) if r.boundary < length]
    if kept:
        return [r.cut(length) for r in kept[:count]]
    rows = [r for r in islice(iter_rows(run.stage_dir("capture")), 64) if r.boundary < min(len(r.token_ids), length)]
    greedy = [r for r in rows if r.temperature == 0][:count]
    if greedy:
        source = "the tokens of answers given at temperature 0"
        return [
            Reference(r.row_id, r.token_ids, r.boundary, [-1] * r.boundary + r.token_ids[r.boundary :], source).cut(
                length
            )
            for r in greedy
        ]
    if not isinstance(model, TransformersStates):
        raise UserError(
            "there is nothing to check the states against: capture left no prompt logprobs, no answer was given at temperature "
            "0, and the target does not fit into memory here",
            "wrong layers or a missing norm would not be seen",
            "capture again with a server that gives prompt logprobs, or set extract.self_check_rows: 0",
        )
    source = "transformers' own logits (capture left no prompt logprobs of the engine)"
    return [
        Reference(r.row_id, ids, r.boundary, [-1, *model.own_tops(ids)[:-1]], source)
        for r in rows[:count]
        for ids in [r.token_ids[:length]]
    ]


def reference_model(run: Run, backend: Any, contract: Contract) -> TransformersStates | WeightsHead:
    """transformers' own forward, where the target fits into memory beside the engine; else its norm and lm_head, with
    which the final state can be checked but not the aux streams."""
    if isinstance(backend, TransformersBackend):
        return backend.model
    target, free = resolve_target(run.recipe.target), free_memory()
    size = 2 * sum(p.stat().st_size for p in target.glob("*.safetensors"))  # as float32
    if size < free / 2:
        trust = run.recipe.target.trust_remote_code
        return TransformersStates(target, contract.aux_layer_ids or [], device="cpu", trust_remote_code=trust)
    run.ui.warn(
        f"the target takes {size / 1e9:.0f} GB in float32 and {free / 1e9:.0f} GB of memory are free: its final states are "
        "checked, its aux streams are not compared with a forward of their own"
    )
    return WeightsHead(target)


def cut(s: States, tokens: int) -> States:
    """The first `tokens` tokens of a row; a causal model's states there do not know of the rest."""
    keep = max(tokens - s.final_start, 0)
    return replace(
        s,
        token_ids=s.token_ids[:tokens],
        aux=s.aux[:tokens],
        final=None if s.final is None else s.final[:keep],
        argmax=None if s.argmax is None else s.argmax[:keep],
    )


def stored(store: Path | None, references: list[Reference]) -> list[tuple[Reference, States]]:
    """References whose rows a store holds already (kept during capture), with those states. The last position of an
    answer is left out: its state was not computed then."""
    if store is None:
        return []
    held = StateStore.open(store)
    there = {e.row_id: e for e in held.index}
    found = [(r, there[r.row_id]) for r in references if r.row_id in there]
    pairs = [(r, e, min(len(r.token_ids), e.tokens - 1)) for r, e in found]
    return [(r.cut(n), cut(held.read_entry(e), n)) for r, e, n in pairs]


def run_self_check(run: Run, backend: Any, contract: Contract, store: Path | None = None) -> Report:
    """Compute a few rows as the long work will (or take them from what capture kept in `store`) and compare; UserError
    (exit 1) if anything is off."""
    section = run.recipe.extract
    if not section.self_check_rows:
        run.ui.warn("extract.self_check_rows is 0: layers, norm and alignment of the states are not verified")
        return Report()
    model = reference_model(run, backend, contract)
    references = choose_references(run, model)
    if pairs := stored(store, references):
        references, made = [r for r, _ in pairs], [s for _, s in pairs]
    elif backend is None:
        run.ui.warn("none of the rows that were to be checked has states: they are not verified")
        return Report()
    else:
        batch = [Item(r.row_id, np.asarray(r.token_ids, dtype=np.int32), r.boundary) for r in references]
        made = backend.compute_full(batch)
    report = compare(made, references, model, contract, section.self_check_min)
    require(report, section.self_check_min)
    run.ui.note(
        f"self-check: the final state gives the most likely token at {report.agreement:.1%} of {report.positions} positions "
        f"(against {report.source}); aux streams within {max(report.aux.values(), default=0.0):.1e}"
    )
    return report


def compare(
    made: list[States],
    references: list[Reference],
    model: TransformersStates | WeightsHead,
    contract: Contract,
    minimum: float,
) -> Report:
    """Both comparisons for states made by any backend, against `model` (transformers) and the references."""
    report = Report(source=references[0].source if references else "none")
    ids, n = contract.aux_layer_ids or [], contract.target.num_layers
    off: dict[int, str] = {}
    full = [model.all_streams(r.token_ids) for r in references] if isinstance(model, TransformersStates) else []
    for states, streams in zip(made, full, strict=bool(full)):
        errors, problems = check_aux(states.aux, ids, streams, AGREES_BF16)
        report.aux = {k: max(v, report.aux.get(k, 0.0)) for k, v in errors.items()}
        off = problems | off  # the first row's words
    report.problems += [off[k] for k in sorted(off)]
    finals = [(s.final, s.final_start) for s in made if s.final is not None]

    def identify() -> str | None:
        got = torch.cat([f for f, _ in finals])
        for k in range(n if full else 0):
            want = torch.cat([x[k, at : at + len(f)] for x, (f, at) in zip(full, finals, strict=True)])
            if relative_l2(got, want) <= AGREES_BF16:
                return f"the stream entering layer {k}, not the one after layer {n - 1}"
        return None

    if len(finals) == len(references) and references:
        rate, report.positions, wrong = check_final(finals, references, model.tops, minimum, identify)
        report.agreement = round(rate, 4)
        if wrong:
            report.problems.append(
                f"the final state gives the most likely token at {rate:.1%} of positions only: {wrong}"
            )
    return report
