"""The stored training states against the target's own: layer, norm, position, another order, or another target.

The sample's rows were run through the target that is served, with every stream kept; whatever a store holds is looked
for among them. Shapes: T tokens, G target hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import Tensor

from draftsmith.diagnose.causes import Cause
from draftsmith.diagnose.subject import Subject
from draftsmith.drafter.model import rms_norm

AGREES = 2e-2
"""Relative L2 within which bf16 streams agree (architecture.md, Words)."""
PROVEN = 6.0
"""Score of a disagreement that was read off the data itself: more nats than any mistaken setting gains."""
ROWS = 4

OTHER, TURNED = "no stream of this target", "a rotation of"


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def states_audit(subject: Subject) -> Iterator[Cause]:
    """One cause: that which most of the compared rows show; nothing without a store."""
    if subject.states_folder is None:
        return
    from draftsmith.extract.store import StateStore
    from draftsmith.target.config import load_config
    from draftsmith.target.weights import head_rule, read_final_norm

    store = StateStore.open(subject.states_folder)
    known = {e.row_id for e in store.index}
    norm, eps = read_final_norm(subject.target).float(), head_rule(load_config(subject.target)).eps
    n = subject.num_layers
    ids = sorted(store.contract.aux_layer_ids or [])
    found: Counter[str] = Counter()
    looked = 0
    for row in [*subject.train_rows, *subject.rows]:
        if row.row_id not in known or looked >= ROWS:
            continue
        looked += 1
        states = store.read(row.row_id)
        if states.token_ids.tolist()[: row.tokens] != row.token_ids[: states.tokens]:
            found["the stored token ids are not the row's"] += 1
            continue
        T = min(states.tokens, row.tokens)
        names = {f"stream {k}": row.streams[k, :T].float() for k in range(n + 1)}
        last = names[f"stream {n}"]
        names |= {f"stream {n}, final norm applied": rms_norm(last, norm, eps)}
        names |= {f"stream {n}, final norm applied twice": rms_norm(rms_norm(last, norm, eps), norm, eps)}
        for b, k in enumerate(ids):
            found[identify(states.aux[:T, b].float(), names, f"aux block {b}", f"stream {k}")] += 1
        if states.final is not None:
            s = states.final_start
            cut = {name: x[s:T] for name, x in names.items()}
            # post_norm is what some extractors keep on purpose; then the norm once applied is what is expected
            kept = ", final norm applied" if store.contract.final_state == "post_norm" else ""
            found[identify(states.final[: T - s].float(), cut, "the final state", f"stream {n}{kept}")] += 1
    for text, count in found.most_common():
        if text and count >= max(1, looked // 2):
            yield _cause(text, count, looked)
            return


def _cause(text: str, count: int, looked: int) -> Cause:
    evidence = [f"{text} ({count} of {looked} rows compared with the target's own forward)"]
    if TURNED in text:
        return Cause(
            "data.rotated",
            "the states were made by a rotated copy of the target (as some quantisers make it)",
            PROVEN,
            evidence,
            "extract from the target as it is served; a drafter of rotated states fits only the rotated target",
        )
    if OTHER in text:
        return Cause(
            "data.revision",
            "the states were made by another target (revision, quantisation) than is served",
            PROVEN,
            evidence,
            "extract the states again from the target that is served, and train again",
        )
    return Cause(
        "data.states",
        f"the training states are not what their contract says: {text}",
        PROVEN,
        evidence,
        "extract the states again, and train again",
    )


def identify(x: Tensor, names: dict[str, Tensor], what: str, expected: str) -> str:
    """ "" if x [T, G] is the expected stream, else a sentence that names what it is."""
    if _distance(x, names[expected]) <= AGREES:
        return ""
    distances = {name: _distance(x, y) for name, y in names.items()}
    best = min(distances, key=lambda k: distances[k])
    if distances[best] <= AGREES:
        return f"{what} holds {best}, not {expected}"
    for by in (-1, 1):
        y = names[expected]
        a, b = (x[1:], y[:-1]) if by == 1 else (x[:-1], y[1:])
        if len(a) > 2 and _distance(a, b) <= AGREES:
            return f"{what} is {expected} one position {'late' if by == 1 else 'early'}"
    if (turned := _turned(x, names)) is not None:
        return f"{what} is {TURNED} {turned} (all lengths and angles between tokens are kept)"
    size = "a little off everywhere" if distances[best] < 0.5 else "far from all"
    return f"{what} is {OTHER}, {size} (nearest {best}, relative L2 {distances[best]:.2f}, expected {expected})"


def _turned(x: Tensor, names: dict[str, Tensor]) -> str | None:
    """The stream that x is a rotation of: the products of its tokens with each other are kept."""
    products = x @ x.t()
    for name, y in names.items():
        if y.shape == x.shape and _distance(products, y @ y.t()) <= AGREES:
            return name
    return None
