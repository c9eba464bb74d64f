"""What the files say and replay can neither prove nor refute: told last, below every cause that was measured."""

from __future__ import annotations

from collections.abc import Iterator

from draftsmith.check.rope import Rope, read_rope
from draftsmith.diagnose.causes import Cause
from draftsmith.diagnose.hypotheses import say_rope
from draftsmith.diagnose.replay import Replayer, Score
from draftsmith.diagnose.subject import Subject
from draftsmith.errors import UserError
from draftsmith.target.config import load_config, text_config
from draftsmith.train.init import rope_of

WEAK = 0.01
"""Score under that of any measured gain (rank.MIN_GAIN)."""


BEYOND = 0.05
"""Share of the answers' tokens past the drafter's positions from which it is worth a word."""


def past_its_positions(subject: Subject) -> Iterator[Cause]:
    """Answers longer than what the drafter's files say of it: the length it was trained at, or its table of positions.
    Releases before 0.28 read past that table; later ones raise it, and what was not trained stays untrained."""
    known = {"max_position_embeddings": subject.checkpoint.config.max_position_embeddings}
    if subject.contract is not None and subject.contract.trained_length:
        known["the contract's trained_length"] = subject.contract.trained_length
    said, limit = min(known.items(), key=lambda kv: kv[1])
    total = sum(end - start for start, end in subject.answer_spans)
    past = sum(max(end - max(start, limit), 0) for start, end in subject.answer_spans)
    if total and past >= BEYOND * total:
        yield Cause(
            "context.length",
            f"{past / total:.0%} of the answers' tokens lie beyond the {limit:,} tokens that the drafter was made for",
            WEAK,
            [
                f"{said} is {limit:,}; the longest captured row has {max(end for _, end in subject.answer_spans):,} tokens"
            ],
            "train on rows as long as those that are served; rope scaling alone does not teach long context",
        )


def rope_unlike(subject: Subject, whole: Replayer, base: Score) -> Iterator[Cause]:
    """A rope that is not the target's, where replay does not speak for it: short texts hardly show one (linear scaling by
    32 costs a drafter of SmolLM2 0.01 nats at 112 tokens), while trainers give a drafter its target's."""
    setup = subject.setup()
    theirs, now = rope_of(text_config(load_config(subject.target))), setup.config.rope
    a, b = read_rope({"rope_parameters": now}), read_rope({"rope_parameters": theirs})
    if not isinstance(a, Rope) or not isinstance(b, Rope) or a.same(b):
        return
    try:
        changed = setup.with_config(rope=theirs)
        gain, error = whole.score(changed).gain_over(base)
    except UserError:  # a type of rope that no drafter has: the target's cannot have been trained with
        return
    if gain + 2 * error < 0:
        return  # the drafter drafts worse with the target's rope: its own is the one that was trained
    longest = max(r.tokens for r in subject.rows)
    yield Cause(
        "rope",
        f"the rope is not the target's, by which a drafter is trained as a rule: rope {say_rope(now)} → {say_rope(theirs)}",
        WEAK,
        [
            f"over texts of up to {longest:,} tokens the change gains {gain:.3f} ± {error:.3f} nats: they cannot tell",
            "its effect grows with the length of the text",
        ],
        "write the rope that was trained with; if this is it, nothing is wrong here",
        setup=changed,
        supposed=changed,
    )
