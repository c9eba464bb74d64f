"""Drafter against target: hidden sizes, embedding, vocabulary, positions, rope, end-of-turn tokens, tokenizer."""

from __future__ import annotations

from pathlib import Path

from draftsmith.check.form_map import reduced
from draftsmith.check.inputs import load_json
from draftsmith.check.look import Finding, Look, fail, finding, ok, skip, warn
from draftsmith.check.rope import read_rope
from draftsmith.errors import UserError


@finding("pair.files")
def files(look: Look) -> Finding:
    """The target's weights where they are here: the engine reads gigabytes before it meets the broken shard."""
    w = look.target.weights
    if not w.files:
        return skip("the target's weights are not here (a config only, or another format)")
    if w.problems:
        more = f" (and {len(w.problems) - 1} more)" if len(w.problems) > 1 else ""
        return fail(f"the target's {w.problems[0]}{more}", "download or copy the target again")
    return ok(f"{len(w.files)} safetensors file(s) of the target, {w.nbytes:,} bytes")


@finding("pair.hidden")
def hidden(look: Look) -> Finding:
    d, t = look.drafter, look.target
    h, g = d.size("hidden_size"), d.size("target_hidden_size")
    if h is None or t.hidden is None:
        return skip("hidden_size of drafter or target cannot be read")
    if g is not None and g != t.hidden:
        return fail(f"target_hidden_size is {g}, the target's hidden size {t.hidden}",
                    "the drafter was made for another target")  # fmt: skip
    if g is None and h != t.hidden:
        return fail(
            f"the drafter's hidden size {h} is not the target's {t.hidden}, and target_hidden_size is absent: fc would "
            "be built for the wrong width",
            f"write target_hidden_size: {t.hidden}, if the drafter was made for this target",
        )
    return ok(f"target {t.hidden}, drafter {h}")


@finding("pair.embedding")
def embedding(look: Look) -> Finding:
    d, t = look.drafter, look.target
    h, full = d.size("hidden_size"), d.size("vocab_size")
    shape = d.shape("embed_tokens.weight")
    if h is None or full is None or t.hidden is None:
        return skip("sizes cannot be read (form.config)")
    if shape is None:
        if h == t.hidden:
            return ok("none of its own: the target's table is shared")
        return fail(
            f"no embed_tokens.weight, and the drafter's hidden size {h} is not the target's {t.hidden}: nothing can be "
            "shared, the table stays uninitialised (V1 runner) or does not fit (V2)",
            "export the drafter with its own embedding",
        )
    if shape != (full, h):
        return fail(f"embed_tokens.weight is {list(shape)}, not [{full}, {h}]", "one row per target token")
    return ok(f"its own, [{full:,}, {h:,}]")


@finding("pair.vocab")
def vocab(look: Look) -> Finding:
    d, t = look.drafter, look.target
    mine, theirs = d.size("vocab_size"), t.vocab
    if mine is None or theirs is None:
        return skip("vocab_size of drafter or target cannot be read")
    if mine == theirs:
        return ok(f"{mine:,} on both sides")
    lm = d.shape("lm_head.weight")
    if lm and lm[0] == mine and mine < theirs:
        guess = f"it looks like the draft size: write vocab_size: {theirs} and draft_vocab_size: {mine}"
    else:
        guess = f"write vocab_size: {theirs}, if the drafter was made for this target's tokenizer"
    return fail(
        f"the drafter's vocab_size is {mine:,}, the target's {theirs:,}: logits are scattered to the wrong width, "
        "without a word or with an IndexError at the first draft",
        guess,
    )


@finding("pair.positions")
def positions(look: Look) -> Finding:
    d, t = look.drafter, look.target
    mine = d.size("max_position_embeddings")
    served = look.options.max_model_len or t.max_positions
    if mine is None or served is None:
        return skip("max_position_embeddings or the served length is not known")
    if mine >= served:
        return ok(f"{mine:,} positions for a served length of {served:,}")
    trained = look.contract.trained_length if look.contract else None
    said = f"max_position_embeddings {mine:,} < served length {served:,}"
    if look.engine_known and not look.release.raises_positions:
        return fail(
            f"{said}: {look.release.label} sizes the rotary table by it and reads past its end (index out of bounds, or "
            "garbage without a word)",
            f"serve with --max-model-len {mine}, write the target's value, or use vLLM 0.28 or later",
        )
    tail = f"nothing past {trained or mine:,} was trained"
    return warn(
        f"{said}: "
        + ("the engine raises it silently; " if look.engine_known else "releases before 0.28 crash; ")
        + tail,
        f"--max-model-len {mine}, or train longer; expect acceptance to fall past the trained length",
    )


@finding("pair.rope")
def rope(look: Look) -> Finding:
    mine, theirs = read_rope(look.drafter.config), look.target.rope
    if isinstance(mine, str) or isinstance(theirs, str):
        return skip("a rope cannot be read (form.rope)")
    if mine.same(theirs) or any(mine.same(r) for r in theirs.layers.values()):
        return ok(str(mine))
    if look.contract and look.contract.rope is not None:
        return ok(f"drafter: {mine}; target: {theirs}; the contract decides (pair.trained_rope)")
    return warn(
        f"drafter: {mine}; target: {theirs}. Legal if it was trained so; no engine compares them",
        "look up what the trainer used (a lost rope_scaling and a lost theta are common); try the other with "
        "draftsmith parity",
    )


@finding("pair.eos")
def eos(look: Look) -> Finding:
    t = look.target
    if not reduced(look):
        return ok("the whole vocabulary")
    if look.drafted is None:
        return skip("no sound map (form.map)")
    special = {i: name for i, name in t.special_ids.items() if t.vocab is None or 0 <= i < t.vocab}
    if not special:
        return skip("the target names no eos_token_id")
    have = set(look.drafted)
    lost = [i for i in special if i not in have]
    if len(lost) == len(special):
        return warn(
            f"the draft vocabulary has none of the target's end tokens ({', '.join(map(str, lost))}): the end of an "
            "answer can never be drafted",
            "force them into the draft vocabulary and train again (vocab.force)",
        )
    return ok(f"{len(special) - len(lost)} of {len(special)} end tokens can be drafted")


def _tokenizer_vocab(folder: Path) -> dict[str, int] | None:
    """token → id of a folder's tokenizer.json, or None."""
    try:
        model = load_json(folder / "tokenizer.json").get("model")
    except UserError:
        return None
    found = model.get("vocab") if isinstance(model, dict) else None
    return found if isinstance(found, dict) else None


@finding("pair.tokenizer")
def tokenizer(look: Look) -> Finding:
    d, t = look.drafter, look.target
    if look.contract and look.contract.tokenizer_hash:
        if t.folder is None:
            return skip("no target folder")
        from draftsmith.check.contract_rows import tokenizer_hash

        now = tokenizer_hash(t.folder)
        if now is None:
            return skip("the target's folder holds no tokenizer to compare with the contract's")
        if now != look.contract.tokenizer_hash:
            return fail(
                "the target's tokenizer is not the one that the drafter was trained with (contract.json: "
                f"{look.contract.tokenizer_hash[:12]}…, now {now[:12]}…)",
                "use the target that was captured, or capture and train again",
            )
        return ok("the tokenizer that the contract names")
    mine = _tokenizer_vocab(d.folder)
    theirs = _tokenizer_vocab(t.folder) if t.folder else None
    if mine is None or theirs is None:
        return ok("nothing to compare: no contract, and not both folders hold a tokenizer.json")
    if mine != theirs:
        differ = sum(1 for k, i in mine.items() if theirs.get(k) != i)
        return warn(
            f"the drafter's own tokenizer.json differs from the target's in {differ:,} tokens",
            "the drafter was made for another target, or the file was copied along; engines use the target's",
        )
    return ok("the drafter's tokenizer.json has the target's vocabulary")
