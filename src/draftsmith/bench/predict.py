"""Predicted beside measured: the drafter's files, replayed by the trainer's model over the texts the engine wrote.

The engine's own greedy answers are run through the target once; the walk of train/validate.py then says what the engine
should have accepted. Both agree within a few hundredths where trainer and engine mean the same by every setting; a
larger gap is a disagreement, and `draftsmith diagnose` looks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.record import read_json


@dataclass(frozen=True)
class Text:
    """One request as a row: prompt and answer ids, and where the answer starts."""

    row_id: str
    source: str
    token_ids: list[int]
    boundary: int


def engine_texts(way_folder: Path, prompts: Mapping[str, Sequence[Any]], target: Path, concurrency: int) -> list[Text]:
    """The answers of a way's passes at `concurrency` (files c<concurrency>-<set>.json), with their prompts rendered as
    the server does. prompts: set → Prompts; requests whose rendering has another length than the server's are left out."""
    from draftsmith.target.tokenizer import TargetTokenizer

    tokenizer = TargetTokenizer.load(target)
    out = []
    for name, some in prompts.items():
        path = way_folder / f"c{concurrency}-{name}.json"
        if not path.exists():
            continue
        by_id = {p.prompt_id: p for p in some}
        for r in read_json(path)["requests"]:
            prompt = by_id.get(r["prompt_id"])
            if prompt is None or not r["token_ids"]:
                continue
            ids = tokenizer.render(prompt.messages)
            if len(ids) == r["prompt_tokens"]:
                out.append(Text(f"{name}/{r['prompt_id']}", name, [*ids, *r["token_ids"]], len(ids)))
    return out


def predict(target: Path, drafter: Path, texts: Sequence[Text], steps: int) -> dict[str, Any]:
    """Acceptance of `drafter` (exported folder, any dialect) over `texts`, by replay, in all and by set.

    Returns {"acceptance_per_position", …, "texts", "sets": {set: the same}}."""
    from draftsmith.diagnose.replay import acceptance
    from draftsmith.diagnose.subject import Sampler, Subject
    from draftsmith.dialects import foreign
    from draftsmith.target.config import target_facts
    from draftsmith.target.weights import read_embedding
    from draftsmith.train.validate import Acceptance

    layers = target_facts(target).num_layers
    checkpoint = foreign.read(drafter, target_layers=layers)
    subject = Subject(drafter, target, checkpoint, [], read_embedding(target).float(), layers, steps)
    setup = subject.setup()
    total = Acceptance([0] * steps)
    sets: dict[str, Acceptance] = {}
    sampler = Sampler(target)
    for text in texts:
        if len(text.token_ids) < text.boundary + 4:
            continue
        # What the last draft of a text proposes beyond its end is counted by the engine too.
        row = sampler.row(replace(text, token_ids=text.token_ids + sampler.continuation(text.token_ids, steps)))
        assert row is not None
        found = acceptance(setup, [row], steps, past=steps)
        sets.setdefault(row.source, Acceptance([0] * steps)).__iadd__(found)
        total += found
    return total.as_dict() | {"texts": len(texts), "sets": {n: a.as_dict() for n, a in sets.items()}}
