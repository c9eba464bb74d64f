"""The draft vocabulary's map: d2t (offsets: target id = i + d2t[i]) and t2d, the only tensors whose bytes are read."""

from __future__ import annotations

from itertools import pairwise

from draftsmith.check.look import MAX_MAP, Finding, Look, fail, finding, ok, skip, warn

EXACT = ("I32", "U32", "U64", "F32", "F64")
"""Types other than I64 in which every offset below 2**24 is itself: read back right, where it is cast."""


def reduced(look: Look) -> bool | None:
    """Whether the engine will use a map: the draft vocabulary is not the whole one; None = cannot be told."""
    d = look.drafter
    full = d.size("vocab_size")
    if full is None or d.draft_vocab is None:
        return None
    return d.draft_vocab != full


@finding("form.map")
def map_there(look: Look) -> Finding:
    d = look.drafter
    need = reduced(look)
    if need is None:
        return skip("vocab_size cannot be read (form.config)")
    if not need:
        if d.has("d2t"):
            return fail(
                "d2t is there, but the draft vocabulary is the whole one: the engine has no map to load it into",
                "leave d2t out, or write draft_vocab_size as trained",
            )
        return ok("the whole vocabulary: no map")
    if d.has("d2t"):
        return ok("d2t is there")
    return fail(
        f"{d.draft_vocab:,} of {d.size('vocab_size'):,} tokens, but no d2t: the engine keeps zeros, so draft token i "
        "becomes target token i, silently",
        "export d2t (int64 offsets) with the weights; some trainers keep it in a file of its own",
    )


@finding("form.map_type")
def map_type(look: Look) -> Finding:
    d = look.drafter
    t = d.tensors.get("d2t")
    if t is None or not reduced(look):
        return ok("no map")
    if len(t.shape) != 1 or t.shape[0] != d.draft_vocab:
        return fail(f"d2t is {list(t.shape)}, but draft_vocab_size is {d.draft_vocab}",
                    "the map, lm_head and draft_vocab_size are of one length")  # fmt: skip
    if t.dtype in EXACT:
        index = not t.dtype.startswith("F") or (look.engine_known and look.release.is_vllm)
        return (warn if index else fail)(
            f"d2t is {t.dtype}, not I64: vLLM casts it without a word"
            + ("" if index else ", other engines index with it and raise"),
            "save it as int64",
        )
    if t.dtype != "I64":
        return fail(f"d2t is {t.dtype}, not I64: it loads without a word, and offsets lose digits or do not fit",
                    "save it as int64")  # fmt: skip
    return ok(f"int64 [{t.shape[0]:,}]")


def first_fall(ids: list[int]) -> int | None:
    """Where a list stops to ascend; None where it ascends throughout."""
    return next((i for i, (a, b) in enumerate(pairwise(ids)) if b <= a), None)


@finding("form.map_values")
def map_values(look: Look) -> Finding:
    d = look.drafter
    if not d.has("d2t") or not reduced(look):
        return ok("no map")
    if d.tensors["d2t"].end - d.tensors["d2t"].start > MAX_MAP:
        return fail(f"d2t takes more than {MAX_MAP:,} bytes", "it has one number per draft token")
    offsets, ids = look.d2t, look.drafted
    if offsets is None or ids is None:
        return skip("d2t is no list of whole numbers (form.map_type)")
    full = d.size("vocab_size") or 0
    if look.ctx.target_config is not None and look.target.vocab:
        full = min(full, look.target.vocab)
    if not ids:
        return fail("d2t is empty", "export the map with the weights")
    outside = next((i for i, x in enumerate(ids) if not 0 <= x < full), None)
    climbing = len(offsets) > 1 and first_fall(offsets) is None
    if (climbing and outside is not None) or _looks_absolute(look):
        return fail(
            f"d2t holds absolute ids ({offsets[0]}, {offsets[1]}, … {offsets[-1]}), not offsets: draft token i would "
            f"become i + d2t[i] ({ids[0]}, {ids[1]}, … {ids[-1]})",
            "subtract 0, 1, 2, … (draftsmith convert does)",
        )
    if outside is not None:
        return fail(
            f"draft token {outside} maps to {ids[outside]}, outside the vocabulary of {full:,}: IndexError at the first "
            "draft",
            "the map belongs to another target, or is damaged",
        )
    at = first_fall(ids)
    if at is not None:
        twice = len(ids) - len(set(ids))
        if twice:
            return fail(
                f"draft tokens {at} and {at + 1} map to {ids[at]} and {ids[at + 1]}: {twice} targets are named twice",
                "every target token has at most one draft token: the map is damaged",
            )
        return fail(
            f"draft tokens {at} and {at + 1} map to {ids[at]} and {ids[at + 1]}: not ascending, as every trainer writes "
            "it, so the map is likely not the one that lm_head was trained with",
            "export the map of the training run",
        )
    return ok(f"{len(ids):,} target ids, strictly ascending, {ids[0]:,} … {ids[-1]:,}")


def _looks_absolute(look: Look) -> bool:
    """Absolute ids that stay inside the vocabulary when read as offsets: t2d then marks d2t itself, not i + d2t."""
    offsets = look.d2t
    return bool(offsets and len(offsets) > 1 and look.t2d == offsets and offsets != look.drafted)


@finding("form.t2d")
def t2d(look: Look) -> Finding:
    d = look.drafter
    t = d.tensors.get("t2d")
    if not reduced(look):
        return ok("no map")
    if t is None:
        return ok("none (vLLM does not read it; SGLang and SpecForge want it)")
    full = d.size("vocab_size")
    marked, ids = look.t2d, look.drafted
    if marked is None:
        return fail(f"t2d is {t.dtype} {list(t.shape)}, not BOOL [{full}]", "save it as bool, one per target token")
    size = t.shape[0]
    if size != full:
        return fail(f"t2d has {size:,} entries for a vocabulary of {full:,}", "the map belongs to another target")
    if not ids or not 0 <= min(ids) <= max(ids) < size or first_fall(ids) is not None:
        return skip("d2t is not sound (form.map_values)")
    if len(marked) != len(ids):
        return fail(f"t2d marks {len(marked):,} tokens, d2t maps {len(ids):,}", "d2t and t2d are of different maps")
    if marked != ids:
        at = next(i for i, (a, b) in enumerate(zip(marked, ids, strict=True)) if a != b)
        return fail(
            f"t2d marks {marked[at]} where draft token {at} maps to {ids[at]}: two different maps",
            "export d2t and t2d of one run; lm_head belongs to only one of them",
        )
    return ok(f"marks the same {len(ids):,} tokens")
