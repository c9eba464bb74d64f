"""What the engine would swallow: registered names, rewritten model types, switches that a release does not read, MLA."""

from __future__ import annotations

from draftsmith.check import values as v
from draftsmith.check.look import Finding, Look, fail, finding, ok, warn
from draftsmith.engine.reader.drafters import looked_up
from draftsmith.errors import nearest


@finding("form.architecture")
def architecture(look: Look) -> Finding:
    d, release = look.drafter, look.release
    if not release.registered:
        return fail(f"{release.label} registers no EAGLE-3 drafter", "a release that has EAGLE-3 (vLLM 0.8.5 or later)")
    if d.speculators:
        kind = d.model_type_of(v.mapping(d.raw, "transformer_layer_config"))
        if not d.declared:
            return fail(
                f"transformer_layer_config.model_type {kind!r}: {release.label} serves llama and qwen3 speculators only",
                "convert to another dialect (draftsmith convert)",
            )
        name = release.speculators_name(d.raw) or d.architecture
        if name in release.registered:
            return ok(f"speculators {kind}: served as {name}")
    name = d.architecture
    if not release.is_vllm:
        name = d.declared or ""
    if name in release.registered:
        note = "" if name == d.declared else f" (written {d.declared})"
        return ok(f"{name}{note} is registered in {release.label}", release.registered_evidence(name))
    if d.declared is None and not d.speculators:
        return fail(
            f"config.json names no architecture; {release.label} would look for {name}",
            'write "architectures": ["LlamaForCausalLMEagle3"]',
        )
    close = [n for n in release.registered if n == release.layout_name(d)] or nearest(name, release.registered, 3)
    return fail(
        f"{name} is not registered in {release.label}",
        f"if the tensors are those of {close[0]}, write that name"
        if close
        else "registered: " + ", ".join(release.registered[:6]),
    )


@finding("form.override")
def override(look: Look) -> Finding:
    """Rewritten to an MTP head before method eagle3 is looked at: the drafter's own class is never reached."""
    d, release = look.drafter, look.release
    made = release.override(d)
    if made is None:
        return ok(f"model_type {d.model_type!r} is left as it is")
    name = looked_up(made.architecture or "", release.registered)
    if name in release.registered:
        return ok(f"model_type {d.model_type!r} becomes {made.model_type!r}; {name} is registered", made.where)
    kind = release.mla_type(d) if d.form == "mla" else "qwen3" if d.form == "qwen3" else "llama"
    by_name = release.override(d, kind) is not None  # another model_type would not help
    what = f"architecture {d.declared!r}" if by_name else f"model_type {d.model_type!r}"
    return fail(
        f"{what} is turned into {made.model_type!r} ({made.architecture}) before the method is looked at; "
        f"{release.label} then looks for {name}, which is no registered drafter",
        'write "architectures": ["LlamaForCausalLMEagle3"]' if by_name else f'write "model_type": "{kind}"',
        made.where,
    )


@finding("form.mla_query")
def mla_query(look: Look) -> Finding:
    d, release = look.drafter, look.release
    if d.form != "mla" or not release.is_vllm:
        return ok("no MLA drafter" if d.form != "mla" else f"{release.label} is not asked")
    if d.config.get("q_lora_rank", 1) is not None:
        return ok(f"q_lora_rank {d.size('q_lora_rank')}")
    place = release.fuses_query(d.architecture)
    if place is None:
        return ok("q_lora_rank is null, and the class asks for that")
    return fail(
        f"q_lora_rank is null, but {d.architecture} loads kv_a_proj_with_mqa into fused_qkv_a_proj, which it builds only "
        "with that rank: the loader finds no such module",
        "train the MLA drafter with a q_lora_rank, or take the Llama form",
        [place],
    )


@finding("form.mla_type")
def mla_type(look: Look) -> Finding:
    d, release = look.drafter, look.release
    if d.form != "mla":
        return ok("no MLA drafter")
    found = release.mla_types
    if found is None or not release.is_vllm:
        return ok(f"{release.label} has no list of MLA drafter types")
    types, evidence = found
    if d.model_type in types:
        return ok(f"model_type {d.model_type} is taken for MLA", evidence)
    return fail(
        f"model_type {d.model_type!r} is not among those that {release.label} takes for an MLA drafter "
        f"({', '.join(sorted(types))}): its attention would be built with the wrong cache",
        f'write "model_type": "{release.mla_type(d)}"',
        evidence,
    )


@finding("silence.window")
def window(look: Look) -> Finding:
    """layer_types copied from a target gives the drafter's layer that layer's attention (models/llama.py)."""
    d = look.drafter
    kinds = d.config.get("layer_types")
    if d.form == "mla" or not isinstance(kinds, list) or not look.release.is_vllm:
        return ok("no layer types: full attention")
    layers = d.size("num_hidden_layers") or 1
    if len(kinds) != layers:
        return fail(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}",
                    "leave layer_types out: it belongs to the target")  # fmt: skip
    sliding = [k for k, kind in enumerate(kinds) if kind == "sliding_attention"]
    if not sliding:
        return ok("full attention in every layer")
    size = d.size("sliding_window")
    if size is None:
        return fail(
            f"layer {sliding[0]} is sliding_attention, but there is no sliding_window", "write both, or neither"
        )
    text = f"layer {sliding[0]} of the drafter attends to the last {size:,} tokens only (layer_types, sliding_window)"
    if d.speculators:
        return ok(f"{text}, as a speculators drafter may be trained")
    return warn(text, "leave layer_types out unless the drafter was trained so")


@finding("silence.switches")
def switches(look: Look) -> Finding:
    d, release = look.drafter, look.release
    if not release.is_vllm:
        if d.switches["norm_before_residual"]:
            return fail("SGLang's Llama drafter ignores norm_before_residual", "serve it in vLLM, or train without it")
        return ok("no switch that SGLang ignores")
    arch = d.architecture
    nested = v.mapping(d.config, "eagle_config")
    lost = []
    for key, on in d.switches.items():
        if not on:
            continue
        under: tuple[str, ...] = ("eagle_config",) if key in nested else ()
        if not release.class_reads(arch, key, under):
            lost.append(f"{'eagle_config.' if under else ''}{key} is not read by {arch}")
        elif d.speculators and release.speculators.place is not None and not release.speculators.understands(key):
            lost.append(f"{key} is not taken over from a speculators config")
    if d.config.get("attention_bias") is True and d.form == "llama" and not release.class_reads(arch, "attention_bias"):
        lost.append("attention_bias is not read: the biases are dropped")
    hidden, g = d.size("hidden_size"), d.size("target_hidden_size")
    if g and g != hidden and d.speculators and not release.speculators.understands("target_hidden_size"):
        lost.append("target_hidden_size is not taken over from a speculators config")
    if not d.use_aux and not release.class_reads(arch, "use_aux_hidden_state", ("eagle_config",)):
        lost.append("eagle_config.use_aux_hidden_state false is not read")
    if lost:
        return fail(
            f"{release.label}: " + "; ".join(lost) + ". Loads without a word, computes another graph",
            "a later release (norm_before_fc 0.18, fc_norm and norm_output 0.22, from a speculators config 0.26), or "
            "draftsmith convert to vllm",
        )
    on_now = [k for k, x in d.switches.items() if x]
    evidence = [e for k in on_now for e in release.key_evidence(arch, k)]
    return ok("every switch is read: " + (", ".join(on_now) or "all are off"), evidence)
