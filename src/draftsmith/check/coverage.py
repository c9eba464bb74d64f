"""--rows: the draft vocabulary against the answers that were captured."""

from __future__ import annotations

from draftsmith.check.form_map import reduced
from draftsmith.check.look import Finding, Look, finding, ok, skip, warn

ENOUGH = 0.9
"""Share of answer tokens below which the drafter loses more than it can win back (recipe: vocab.min_coverage)."""
MOST_ROWS = 20_000


@finding("pair.coverage")
def coverage(look: Look) -> Finding:
    import numpy as np

    from draftsmith.capture.rows import iter_rows

    full = look.drafter.size("vocab_size")
    if not reduced(look):
        return ok("the whole vocabulary")
    if not look.drafted or full is None or not 0 <= min(look.drafted) <= max(look.drafted) < full:
        return skip("no sound map (form.map)")
    have = np.zeros(full, dtype=bool)
    have[look.drafted] = True
    inside = total = rows = 0
    for row in iter_rows(look.ctx.__dict__["rows_folder"]):
        answer = np.asarray(row.token_ids[row.boundary :], dtype=np.int64)
        answer = answer[(answer >= 0) & (answer < full)]
        inside, total, rows = inside + int(have[answer].sum()), total + len(answer), rows + 1
        if rows >= MOST_ROWS:
            break
    if not total:
        return skip("the rows hold no answer tokens")
    share = inside / total
    text = f"{100 * share:.2f} % of {total:,} answer tokens in {rows:,} rows can be drafted"
    if share < ENOUGH:
        return warn(text, f"a larger draft vocabulary, chosen from these answers (now {len(look.drafted):,})")
    return ok(text)
