"""The draft vocabulary's map: d2t (offsets: target id = i + d2t[i]) and t2d, the only tensors whose bytes are read."""

from __future__ import annotations

from draftsmith.check.look import MAX_MAP, Finding, Look, fail, finding, ok, skip, warn


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
            return warn(
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
    if t.dtype != "I64":
        return fail(f"d2t is {t.dtype}, not I64: it loads without a word, and large offsets lose their last digits"
                    if t.dtype.startswith(("F", "B")) else f"d2t is {t.dtype}, not I64",
                    "save it as int64")  # fmt: skip
    return ok(f"int64 [{t.shape[0]:,}]")


@finding("form.map_values")
def map_values(look: Look) -> Finding:
    import numpy as np

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
    if len(ids) == 0:
        return fail("d2t is empty", "export the map with the weights")
    inside = (ids >= 0) & (ids < full)
    ascending = bool((np.diff(ids) > 0).all())
    if (bool((np.diff(offsets) > 0).all()) and len(offsets) > 1 and not inside.all()) or _looks_absolute(look):
        return fail(
            f"d2t holds absolute ids ({offsets[0]}, {offsets[1]}, … {offsets[-1]}), not offsets: draft token i would "
            f"become i + d2t[i] ({ids[0]}, {ids[1]}, … {ids[-1]})",
            "subtract 0, 1, 2, … (draftsmith convert does)",
        )
    if not inside.all():
        at = int(np.argmin(inside))
        return fail(
            f"draft token {at} maps to {ids[at]}, outside the vocabulary of {full:,}: IndexError at the first draft",
            "the map belongs to another target, or is damaged",
        )
    if not ascending:
        at = int(np.argmax(np.diff(ids) <= 0))
        twice = len(ids) - len(np.unique(ids))
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
    import numpy as np

    offsets, mask, ids = look.d2t, look.t2d, look.drafted
    if offsets is None or mask is None or ids is None or len(offsets) < 2 or int(mask.sum()) != len(offsets):
        return False
    return bool(np.array_equal(np.flatnonzero(mask), offsets) and not np.array_equal(offsets, ids))


@finding("form.t2d")
def t2d(look: Look) -> Finding:
    import numpy as np

    d = look.drafter
    t = d.tensors.get("t2d")
    if not reduced(look):
        return ok("no map")
    if t is None:
        return ok("none (vLLM does not read it; SGLang and SpecForge want it)")
    full = d.size("vocab_size")
    mask, ids = look.t2d, look.drafted
    if mask is None:
        return fail(f"t2d is {t.dtype} {list(t.shape)}, not BOOL [{full}]", "save it as bool, one per target token")
    if len(mask) != full:
        return fail(f"t2d has {len(mask):,} entries for a vocabulary of {full:,}", "the map belongs to another target")
    if ids is None or (ids < 0).any() or (ids >= len(mask)).any() or not (np.diff(ids) > 0).all():
        return skip("d2t is not sound (form.map_values)")
    count = int(mask.sum())
    if count != len(ids):
        return fail(f"t2d marks {count:,} tokens, d2t maps {len(ids):,}", "d2t and t2d are of different maps")
    if not np.array_equal(np.flatnonzero(mask), ids):
        at = int(np.argmax(np.flatnonzero(mask) != ids))
        return fail(
            f"t2d marks {np.flatnonzero(mask)[at]} where draft token {at} maps to {ids[at]}: two different maps",
            "export d2t and t2d of one run; lm_head belongs to only one of them",
        )
    return ok(f"marks the same {count:,} tokens")
