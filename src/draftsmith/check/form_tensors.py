"""The drafter's tensors against the graph that its config builds: inventory, names, shapes, types, norms, head."""

from __future__ import annotations

from draftsmith.check.drafter import OWN_TENSORS
from draftsmith.check.look import Finding, Look, fail, finding, ok, skip, warn
from draftsmith.errors import nearest

FLOATS = ("BF16", "F16", "F32")
QUANT_PARTS = ("_scale", "_scale_inv", "_scale_2", ".scales", ".qzeros", ".qweight", ".g_idx", "_packed", "_shape",
               "zero_point", "input_scale")  # fmt: skip


def _quantised(look: Look) -> bool:
    return isinstance(look.drafter.config.get("quantization_config"), dict)


@finding("form.inventory")
def inventory(look: Look) -> Finding:
    d = look.drafter
    biases = [n for n in d.required if n.endswith(".bias")]
    missing = [n for n in d.required if not d.has(n)]
    if _quantised(look):
        stems = {n.rsplit(".", 1)[0] for n in d.tensors}
        missing = [n for n in missing if n.rsplit(".", 1)[0] not in stems]
    if not missing:
        return ok(f"all {len(d.required)} tensors of a {d.form} drafter are there")
    if set(missing) <= set(biases):
        switch = "mlp_bias" if all(".mlp." in n for n in missing) else "attention_bias"
        return fail(
            f"{switch} is true, but {', '.join(missing[:3])} are missing: they stay uninitialised",
            f"write {switch}: false, or export the biases",
        )
    what = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    return fail(
        f"missing: {what}; the engine loads without them, silently, with whatever the memory holds",
        "export again from the trained checkpoint; converters that lose a rename do this",
    )


@finding("form.names")
def names(look: Look) -> Finding:
    d = look.drafter
    if d.stray_prefixes:
        prefix, name = next(iter(d.stray_prefixes.items()))
        return fail(
            f"names begin with {prefix!r} ({name}): the loader puts 'model.' before them itself and finds no such module",
            f"strip {prefix!r} from every name (draftsmith convert does)",
        )
    if twice := d.twice:
        return fail(
            f"{' and '.join(twice[0])} are one tensor to the loader: the one that is read last stays",
            "export the layer under one spelling",
        )
    known = set(d.required) | {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d", "input_norm.weight",
                               "mask_hidden"}  # fmt: skip
    unknown = []
    for n in d.tensors:
        if n in known or n.endswith(".bias") or (n.startswith("fc_norm.") and n.endswith(".weight")):
            continue
        if n.endswith(QUANT_PARTS) and _quantised(look):
            continue
        if n.endswith("hidden_norm.weight") and n.startswith("layers."):
            continue
        unknown.append(n)
    if not unknown:
        return ok("every name is one that the class knows")
    close = nearest(unknown[0], list(d.required))
    hint = f"; near {close[0]}" if close else ""
    part = unknown[0].split(".", 1)[0]
    reason = "no such module" if part not in OWN_TENSORS else "no such parameter there"
    return fail(
        f"unknown: {', '.join(unknown[:4])}{f' and {len(unknown) - 4} more' if len(unknown) > 4 else ''} "
        f"({reason}{hint}); the loader raises on the first",
        "leave them out; optimiser state and verifier_* tensors belong to training",
    )


@finding("form.sizes")
def sizes(look: Look) -> Finding:
    d = look.drafter
    if _quantised(look):
        return ok("quantised: packed shapes are not compared")
    wrong = []
    for n, wanted in d.required.items():
        shape = d.shape(n)
        if shape is None or n == "fc.weight":
            continue
        if len(shape) != len(wanted) or any(w is not None and w != s for w, s in zip(wanted, shape, strict=False)):
            wrong.append((n, shape, wanted))
    if not wrong:
        return ok(f"all shapes follow from hidden {d.size('hidden_size')}, MLP {d.size('intermediate_size')}")
    n, shape, wanted = wrong[0]
    hint = "write the sizes that were trained"
    if "_proj" in n and "self_attn" in n and d.heads and d.form != "mla":
        q = d.shape("layers.0.self_attn.q_proj.weight")
        k = d.shape("layers.0.self_attn.k_proj.weight")
        if q and k and q[0] % d.heads[0] == 0:
            dim = q[0] // d.heads[0]
            hint = f"head_dim {dim} and num_key_value_heads {k[0] // dim if dim else '?'} would fit {d.heads[0]} heads"
        if len(shape) == 2 and len(wanted) == 2 and shape[1] * 2 == (wanted[1] or 0):
            hint = "layer 0 of an EAGLE-3 drafter reads [embedding, state], twice the hidden size"
    return fail(
        f"{n} is {list(shape)}, but the config gives {['?' if w is None else w for w in wanted]}"
        + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""),
        hint,
    )


def aux_count(look: Look) -> tuple[int, str]:
    """Number of aux states that fc is built for, and the key that says so. Without an engine: as vLLM 0.22 and later
    count (num_aux_hidden_states, nested ids, else 3)."""
    d = look.drafter
    if look.engine_known:
        return look.release.aux_count(d)
    if n := d.size("num_aux_hidden_states"):
        return n, "num_aux_hidden_states"
    if d.nested_ids:
        return len(d.nested_ids), "eagle_config.eagle_aux_hidden_state_layer_ids"
    return 3, "the engine's default"


@finding("form.fc")
def fc(look: Look) -> Finding:
    d = look.drafter
    shape = d.shape("fc.weight")
    hidden = d.size("hidden_size")
    if not d.use_aux:
        return ok("use_aux_hidden_state is false: no fc")
    if shape is None or hidden is None:
        return skip("no fc.weight or hidden_size (form.inventory, form.config)")
    if len(shape) != 2:
        return fail(f"fc.weight is {list(shape)}", "it must be [hidden, aux layers x target hidden]")
    count, by = aux_count(look)
    declared = d.size("target_hidden_size")
    wide = declared or hidden
    if shape == (hidden, count * wide):
        return ok(f"fc.weight {list(shape)}: {count} aux states of {wide} ({by})")
    ids = d.top_ids or d.nested_ids
    theirs = look.target.hidden if look.ctx.target_config is not None else None
    if shape == (hidden, count * (theirs or 0)):
        fix = f"write target_hidden_size: {theirs}"
    elif shape[0] == hidden and shape[1] % (theirs or wide) == 0:
        made_for = shape[1] // (theirs or wide)
        fix = f"write num_aux_hidden_states: {made_for}" + (
            "" if ids and len(ids) == made_for else f" and the {made_for} layer ids that were trained"
        )
        if look.engine_known and not look.release.class_reads(d.architecture, "num_aux_hidden_states"):
            fix = f"{look.release.label} always builds fc for 3 aux states: use a later release, or 3 layers"
    elif shape[0] == hidden and count and shape[1] % count == 0 and declared is None:
        fix = f"write target_hidden_size: {shape[1] // count}"
    else:
        fix = "the fc belongs to another target, or the config to another drafter"
    return fail(
        f"fc.weight is {list(shape)}, but the engine builds [{hidden}, {count} x {wide} = {count * wide}] "
        f"({count} aux states by {by})",
        fix,
    )


@finding("form.lm_head")
def lm_head(look: Look) -> Finding:
    d = look.drafter
    rows, hidden = d.draft_vocab, d.size("hidden_size")
    shape = d.shape("lm_head.weight")
    full = d.size("vocab_size")
    if shape is None and _quantised(look) and any(n.startswith("lm_head.") for n in d.tensors):
        return ok("quantised lm_head")
    if shape is None:
        if rows == full and d.config.get("draft_vocab_size") in (None, full):
            return ok("none of its own: the target's is shared")
        return fail(
            f"no lm_head.weight for a draft vocabulary of {rows}: the engine shares the target's head of {full} rows",
            "export lm_head with one row per draft token",
        )
    if rows is None or hidden is None:
        return skip("vocab_size or hidden_size cannot be read (form.config)")
    if shape != (rows, hidden):
        tied = " (those are the embedding's: a tied save overwrote it)" if shape == (full, hidden) else ""
        return fail(
            f"lm_head.weight is {list(shape)}, but draft_vocab_size x hidden_size is [{rows}, {hidden}]{tied}",
            f"write draft_vocab_size: {shape[0]}"
            if len(shape) == 2 and shape[1] == hidden and not tied
            else "export the head that was trained, with tie_word_embeddings: false",
        )
    return ok(f"lm_head.weight [{rows:,}, {hidden:,}]")


@finding("form.dtypes")
def dtypes(look: Look) -> Finding:
    d = look.drafter
    if _quantised(look):
        return ok("quantised (form.quantisation)")
    skipped = ("d2t", "t2d")
    floats = {n: t.dtype for n, t in d.tensors.items() if n not in skipped}
    odd = {n: t for n, t in floats.items() if t not in FLOATS}
    wide = [n for n, t in odd.items() if t == "F64"]
    if len(odd) > len(wide):
        n, t = next((n, t) for n, t in odd.items() if t != "F64")
        return fail(f"{n} is {t}", "weights are BF16, F16 or F32")
    if wide:
        return warn(f"{wide[0]} is F64: four times the bytes, and cast at load", "save all weights as bfloat16")
    kinds = sorted(set(floats.values()))
    declared = d.raw.get("torch_dtype") or d.raw.get("dtype")
    name = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    if len(kinds) > 1:
        return warn(
            f"mixed types: {', '.join(kinds)}", "save all weights in one type; the engine casts to the target's"
        )
    if kinds == ["F32"] and isinstance(declared, str) and declared not in ("float32", name["F32"]):
        return warn(
            f"weights are F32, but the config says {declared}: twice the bytes, and cast at load",
            f"save them as {declared}",
        )
    return ok(", ".join(kinds) or "no floating-point tensors")


@finding("form.norms")
def norms(look: Look) -> Finding:
    d = look.drafter
    on = d.switches
    has_fc_norm = any(n.startswith("fc_norm.") for n in d.tensors)
    count, _ = aux_count(look)
    wide = d.size("target_hidden_size") or d.size("hidden_size") or 0
    if on["norm_before_fc"] and not d.has("input_norm.weight"):
        return fail("norm_before_fc is true, but input_norm.weight is missing: it stays uninitialised",
                    "export input_norm.weight, or write norm_before_fc: false")  # fmt: skip
    if on["norm_before_fc"] and d.form == "mla":
        return fail("norm_before_fc on an MLA drafter: its class has no input_norm", "use fc_norm, or the Llama form")
    if d.shape("input_norm.weight") not in (None, (count * wide,)) and on["norm_before_fc"]:
        return fail(f"input_norm.weight is {list(d.shape('input_norm.weight') or ())}, not [{count * wide}]",
                    "it norms all aux states at once: aux layers x target hidden")  # fmt: skip
    if on["fc_norm"]:
        lost = [f"fc_norm.{i}.weight" for i in range(min(count, 64)) if not d.has(f"fc_norm.{i}.weight")]
        if lost:
            return fail(f"fc_norm is true, but {', '.join(lost)} are missing", "export them, or write fc_norm: false")
        bad = [i for i in range(count) if d.shape(f"fc_norm.{i}.weight") != (wide,)]
        if bad:
            return fail(f"fc_norm.{bad[0]}.weight is {list(d.shape(f'fc_norm.{bad[0]}.weight') or ())}, not [{wide}]",
                        "one norm of the target's hidden size per aux layer")  # fmt: skip
    elif has_fc_norm:
        return fail("fc_norm tensors without fc_norm: true: the loader raises on them",
                    "write fc_norm: true (EAGLE-3.1)")  # fmt: skip
    return ok("switches and tensors agree: " + (", ".join(k for k, x in on.items() if x) or "all off"))


@finding("silence.input_norm")
def input_norm(look: Look) -> Finding:
    d = look.drafter
    if d.has("input_norm.weight") and not d.switches["norm_before_fc"]:
        return fail(
            "input_norm.weight is there, but norm_before_fc is not true: the engine drops the norm without a word",
            "write norm_before_fc: true",
        )
    return ok("no norm is dropped")


@finding("silence.bias")
def bias(look: Look) -> Finding:
    d = look.drafter
    extra = [n for n in d.tensors if n.endswith(".bias") and n not in d.required]
    if not extra:
        return ok("no bias is dropped")
    attention = all(".self_attn." in n for n in extra) and any(n.endswith("q_proj.bias") for n in extra)
    return fail(
        f"{', '.join(extra[:3])}{' …' if len(extra) > 3 else ''}: the loader ignores biases that the graph has not",
        "write attention_bias: true"
        if attention and d.config.get("attention_bias") is not True
        else "the class has no such bias: train without it",
    )


@finding("silence.residual")
def residual(look: Look) -> Finding:
    d = look.drafter
    if "norm_before_residual" in d.config and d.config["norm_before_residual"] is not None:
        return ok(f"norm_before_residual: {str(d.switches['norm_before_residual']).lower()}, written")
    if not d.speculators:
        return ok("norm_before_residual is absent: False, as in every format but speculators")
    trained = look.contract.norms.norm_before_residual if look.contract and look.contract.norms else None
    if trained is True:
        return ok("norm_before_residual is absent: the engine takes True, as trained")
    return (fail if trained is False else warn)(
        "norm_before_residual is absent from a speculators config: the engine takes True, speculators' own default is "
        "False" + (", and the drafter was trained with False" if trained is False else ""),
        "write it, as trained",
    )
