"""Rows from logs instead of from a running target (capture.trust_answers): only for answers that the target itself gave.

Where the log holds token ids, these are the row. Else each assistant turn is rendered as at inference: the boundary is
the end of the generation prompt, or, where that diverges (a prefilled <think>), the common prefix, provided that the
history agrees; what the template writes after the end of the turn is cut off.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.capture.plan import Plan, require_share
from draftsmith.capture.prompts import Prompt
from draftsmith.capture.rows import Row, RowWriter, row_facts, row_id, rows_hash
from draftsmith.target.tokenizer import Message, RenderError, TargetTokenizer, Thinking, common_length, stop_ids
from draftsmith.ui import Ui

UNKNOWN = float("nan")
"""Temperature and top_p of answers whose sampling is not known."""

REWRITTEN, NO_ANSWER = "the template rewrites the history", "no answer in the record"


class Renderer:
    """Splits rendered turns into prompt and answer."""

    def __init__(self, tokenizer: TargetTokenizer, thinking: Thinking) -> None:
        self.tokenizer, self.thinking = tokenizer, thinking
        self.ends = {*stop_ids(tokenizer.folder), *tokenizer.end_of_turn_ids}

    def turn(self, messages: Sequence[Message], point: int, tools: Any) -> tuple[list[int], int] | str:
        """(ids of prompt and answer, boundary) of the assistant turn at `point`, or why there is none."""
        try:
            history, answered = list(messages[:point]), list(messages[: point + 1])
            prompt = self.tokenizer.render(history, self.thinking, tools=tools)
            whole = self.tokenizer.render(answered, self.thinking, tools=tools, generation_prompt=False)
            boundary = common_length(prompt, whole)
            if boundary < len(prompt):
                before = self.tokenizer.render(history, self.thinking, tools=tools, generation_prompt=False)
                if boundary < len(before) or whole[: len(before)] != before:
                    return REWRITTEN
        except RenderError as e:
            return f"the template refuses it ({str(e)[:60]})"
        end = next((i + 1 for i in range(boundary, len(whole)) if whole[i] in self.ends), len(whole))
        if end == boundary or (end == boundary + 1 and whole[boundary] in self.ends):
            return NO_ANSWER
        return whole[:end], boundary


def rows_of(prompt: Prompt, renderer: Renderer | None, thinking: str, left_out: Counter[str]) -> list[Row] | str:
    """The rows of one record, or why it gives none. left_out: gets the reasons of turns that give none beside others
    that do."""
    logged = prompt.logged
    points = [p for p in prompt.points if p < len(prompt.messages)]
    if not points:
        return NO_ANSWER
    if logged and logged.prompt_ids and logged.answer_ids:
        found = [(len(points) - 1, [*logged.prompt_ids, *logged.answer_ids], len(logged.prompt_ids))]
    else:
        if renderer is None:
            return "no token ids in the record, and the tokenizer cannot be loaded here"
        found, reasons = [], Counter[str]()
        # a log holds one answer of the model that is trusted; in a conversation every turn is
        for turn, point in list(enumerate(points))[-1 if logged else 0 :]:
            made = renderer.turn(prompt.messages, point, prompt.tools)
            if isinstance(made, str):
                reasons[made] += 1
                continue
            ids, boundary = made
            if logged and logged.finish_reason == "length" and ids[-1] in renderer.ends:
                ids = ids[:-1]  # it was cut: the end that the template writes was never said
            found.append((turn, ids, boundary))
        if not found:
            return next(iter(reasons))
        left_out += reasons
    return [
        Row(
            row_id=row_id(prompt.prompt_id, 0, turn),
            prompt_id=prompt.prompt_id,
            sample=0,
            turn=turn,
            source=prompt.source,
            token_ids=list(ids),
            boundary=boundary,
            finish_reason=(logged.finish_reason if logged else "") or "stop",
            thinking=thinking,
            temperature=UNKNOWN,
            top_p=UNKNOWN,
            server_model=(logged.model if logged else "") or "imported",
            answer_text=str(prompt.messages[points[turn]]["content"]),
        )
        for turn, ids, boundary in found
    ]


def import_rows(
    plan: Plan, folder: Path, tokenizer: TargetTokenizer | None, thinking: Thinking, ui: Ui, max_dropped: float
) -> dict[str, Any]:
    """Turn all records of a plan into rows; returns the counts. UserError where too many give none."""
    if folder.exists():  # left by a kill: reading logs again costs little
        shutil.rmtree(folder)
    renderer = Renderer(tokenizer, thinking) if tokenizer else None
    writer, lost, turns = RowWriter(folder, every_rows=5000), Counter[str](), Counter[str]()
    with ui.task("import", plan.total, "records") as task:
        for prompt in plan:
            found = rows_of(prompt, renderer, thinking, turns)
            if isinstance(found, str):
                lost[found] += 1
                writer.give_up(prompt.prompt_id, 0, found)
            else:
                writer.add(found)
            task.advance(1)
    writer.close_part()
    require_share(writer.count, lost, max_dropped, "import")
    ui.warn("the answers are taken on trust: if another model gave them, the drafter learns that model, not the target")
    if lost:
        ui.note("records without rows: " + ", ".join(f"{n:,} {r}" for r, n in lost.most_common()))
    if turns:
        ui.note("turns without a row: " + ", ".join(f"{n:,} {r}" for r, n in turns.most_common()))
    return {
        "prompts": plan.total,
        "rows": writer.count,
        "trusted": True,
        "prompts_dropped": dict(plan.dropped),
        "answers_given_up": dict(lost),
        "turns_left_out": dict(turns),
        **row_facts(folder),
        "output_hash": rows_hash(folder),
    }
