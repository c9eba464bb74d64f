"""The vocab stage: after capture, before anything is trained; its map is kept on every later start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.capture.rows import iter_rows
from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.recipe import DRAFT_VOCAB
from draftsmith.stage import Run, Stage
from draftsmith.taken_over import draft_ids, hashed, vocab_start
from draftsmith.target.resolve import resolve_target
from draftsmith.target.tokenizer import TargetTokenizer, chat_template_hash, tokenizer_hash
from draftsmith.vocab.choose import Forced, choose, count_answers, coverage, forced_tokens
from draftsmith.vocab.map import VocabMap


def _target(run: Run) -> Path:
    return resolve_target(run.recipe.target, weights=not run.recipe.capture.endpoints)


def inputs(run: Run) -> dict[str, str]:
    """The captured rows, and the tokenizer and template that say which tokens are special."""
    folder = _target(run)
    return {
        "capture": run.output_hash("capture"),
        "tokenizer": tokenizer_hash(folder),
        "chat_template": chat_template_hash(folder) or "none",
        **hashed(vocab_start(run.recipe)),
    }


def _answers(folder: Path) -> Iterator[tuple[str, list[int]]]:
    for row in iter_rows(folder):
        yield row.prompt_id, row.token_ids[row.boundary :]


def forced_of(run: Run, folder: Path) -> Forced:
    tokenizer: TargetTokenizer | None
    try:
        tokenizer = TargetTokenizer.load(folder, run.recipe.target.trust_remote_code)
    except UserError as e:
        run.ui.warn(f"{e.what}; special tokens are taken from the tokenizer's files")
        tokenizer = None
    return forced_tokens(folder, tokenizer, run.recipe.vocab.force)


def work(run: Run, folder: Path) -> dict[str, Any]:
    """Count, choose, save; warn under the wanted coverage."""
    section = run.recipe.vocab
    contract = Contract.load(run.stage_dir("capture"))
    heard, held = count_answers(_answers(run.stage_dir("capture")), contract.target.vocab_size)
    if (start := vocab_start(run.recipe)) is not None:
        return _keep(run, folder, contract, start, heard + held)
    forced = forced_of(run, _target(run))
    size = section.size or DRAFT_VOCAB
    choice = choose(heard + held, size, forced)
    # chosen without the held-out prompts, only to measure what unseen prompts will find
    tested = coverage(held, choose(heard, size, forced).map.t2d) if held.sum() else None
    choice.map.save(folder)
    contract.with_(draft_vocab_size=choice.map.draft_size, vocab_map_hash=choice.map.hash()).save(folder)
    run.ui.note(
        f"draft vocab: {choice.map.draft_size:,} of {choice.map.vocab_size:,} tokens, coverage {choice.coverage:.2%} of the "
        f"answer tokens" + (f" ({tested:.2%} on prompts that had no part in the choice)" if tested is not None else "")
    )
    if choice.filler:
        run.ui.note(f"{choice.filler:,} of {choice.map.draft_size:,} slots are filler: the answers hold fewer tokens")
    if choice.left_out:
        run.ui.note(f"{choice.left_out:,} special tokens that no answer holds have no slot")
    worst = min(choice.coverage, tested if tested is not None else 1.0)
    if worst < section.min_coverage:
        run.ui.warn(
            f"coverage {worst:.2%} is under {section.min_coverage:.0%}: tokens outside the draft vocab are never proposed; "
            "raise vocab.size or capture more answers"
        )
    return {
        "size": choice.map.draft_size,
        "vocab_size": choice.map.vocab_size,
        "answer_tokens": int(heard.sum() + held.sum()),
        "coverage": round(choice.coverage, 6),
        "coverage_held_out": round(tested, 6) if tested is not None else None,
        "forced": choice.forced,
        "filler": choice.filler,
        "specials_left_out": choice.left_out,
        "output_hash": choice.map.hash(),
    }


def _keep(run: Run, folder: Path, contract: Contract, start: Path, heard: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Save the draft vocab of the drafter that the training starts from; warn under the wanted coverage."""
    target = contract.target
    kept = VocabMap.from_ids(draft_ids(start, target.num_layers, target.vocab_size), target.vocab_size)
    kept.save(folder)
    contract.with_(draft_vocab_size=kept.draft_size, vocab_map_hash=kept.hash()).save(folder)
    covered = coverage(heard, kept.t2d)
    run.ui.note(
        f"draft vocab: the {kept.draft_size:,} tokens of {start}, coverage {covered:.2%} of the answer tokens "
        "(vocab.size chooses a new one from the answers)"
    )
    if covered < run.recipe.vocab.min_coverage:
        run.ui.warn(
            f"coverage {covered:.2%} is under {run.recipe.vocab.min_coverage:.0%}: tokens outside the draft vocab are never "
            "proposed; set vocab.size to choose a new one (the rows of lm_head move with their tokens)"
        )
    return {
        "size": kept.draft_size,
        "vocab_size": kept.vocab_size,
        "answer_tokens": int(heard.sum()),
        "coverage": round(covered, 6),
        "kept": True,
        "output_hash": kept.hash(),
    }


STAGE = Stage("vocab", ("vocab",), inputs, work, resumable=False)
