"""The drafter's form, from its config alone: files, keys, family, method, heads, rope."""

from __future__ import annotations

from draftsmith.check import values as v
from draftsmith.check.look import Finding, Look, fail, finding, ok, skip, warn
from draftsmith.check.rope import Rope, read_rope


@finding("form.files")
def files(look: Look) -> Finding:
    w = look.drafter.weights
    if w.problems:
        more = f" (and {len(w.problems) - 1} more)" if len(w.problems) > 1 else ""
        return fail(w.problems[0] + more, "copy or export the folder again; its weights are not whole")
    if not w.tensors and w.pickles:
        return skip(
            f"only pickled weights ({', '.join(p.name for p in w.pickles[:3])}), which are never opened here",
            "convert them to safetensors (draftsmith convert) and check the result",
        )
    if not w.tensors:
        return fail("no weights at all", "the folder holds a config only: give the whole drafter")
    note = f"; {w.pickles[0].name} beside them is not looked at" if w.pickles else ""
    return ok(f"{len(w.tensors)} tensors in {len(w.files)} safetensors file(s), {w.nbytes:,} bytes{note}")


DTYPES = tuple(
    p + n
    for p in ("", "torch.")
    for n in ("bfloat16", "float16", "float32", "float64", "half", "float", "double", "float8_e4m3fn", "float8_e5m2")
)
"""What torch_dtype may say: transformers asks torch for the attribute of that name."""


def _wrong_types(config: v.Config) -> list[str]:
    wrong = []
    for key in v.SIZES:
        value = config.get(key)
        if key in config and not (value is None and key in v.NULLABLE) and v.size(config, key) is None:
            wrong.append(f"{key} is {v.shown(value)}, not a positive whole number")
    for key in (*v.STRICT_BOOLS, *v.SWITCHES):
        if key in config and not isinstance(config[key], bool):
            value = config[key]
            if value is None and key in v.SWITCHES:
                continue  # read as False everywhere
            wrong.append(f"{key} is {v.shown(value)}, not true or false")
    if "architectures" in config and not (
        isinstance(config["architectures"], list) and all(isinstance(a, str) for a in config["architectures"])
    ):
        wrong.append(f"architectures is {v.shown(config['architectures'])}, not a list of names")
    eps = config.get("rms_norm_eps", 1e-6)
    if v.number({"e": eps}, "e") is None or not 0 < float(eps) < 1:
        wrong.append(f"rms_norm_eps is {v.shown(eps)}")
    for key in ("torch_dtype", "dtype"):
        if config.get(key) not in (None, "auto", *DTYPES):
            wrong.append(f"{key} is {v.shown(config[key])}, not a type that torch has")
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and ids != [] and v.ids(ids) is None:
        wrong.append(f"eagle_aux_hidden_state_layer_ids is {v.shown(ids)}, not a list of layer numbers")
    return wrong


def _absent(config: v.Config, model_type: str) -> list[str]:
    """Keys whose absence gives the graph another size than any drafter of this kind has."""
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    defaults = v.DEFAULTS.get(model_type, v.LLAMA)
    return [f"{k} is absent: the library takes {defaults.get(k)}" for k in keys if k not in config]


@finding("form.config")
def config(look: Look) -> Finding:
    d = look.drafter
    if d.speculators and not isinstance(d.raw.get("transformer_layer_config"), dict):
        return fail("no transformer_layer_config in a speculators config", "export the drafter again")
    wrong = _wrong_types(d.config)
    nested = d.raw.get("eagle_config")
    if nested is not None and not isinstance(nested, dict):
        wrong.append(f"eagle_config is {v.shown(nested)}, not an object")
    elif isinstance(nested, dict):
        ids = nested.get("eagle_aux_hidden_state_layer_ids")
        if ids is not None and ids != [] and v.ids(ids) is None:
            wrong.append(f"eagle_config.eagle_aux_hidden_state_layer_ids is {v.shown(ids)}")
    if wrong:
        return fail("; ".join(wrong[:4]), "write the value that was trained; leave out what is null")
    if absent := _absent(d.config, d.model_type):
        return fail("; ".join(absent[:4]), "write every size into config.json")
    layers = d.size("num_hidden_layers") or 0
    if layers > 64:
        return fail(f"num_hidden_layers is {layers}", "an EAGLE-3 drafter has one layer, or a few")
    return ok(f"{len(d.config)} keys, model_type {d.model_type}, {layers} layer(s)")


@finding("form.activation")
def activation(look: Look) -> Finding:
    """Every EAGLE-3 drafter class builds a SiLU-gated MLP and refuses another name (models/llama.py: LlamaMLP)."""
    name = look.drafter.config.get("hidden_act", "silu")
    if name == "silu":
        return ok("silu")
    return fail(
        f"hidden_act is {v.shown(name)}: the drafter classes take silu only, and raise while they are built",
        "train with silu; where silu was trained and the target's name was copied, write silu",
    )


@finding("form.model_type")
def model_type(look: Look) -> Finding:
    d = look.drafter
    if d.speculators:
        return ok("a speculators config has a class of its own")
    name = d.config.get("model_type")
    if not isinstance(name, str) or not name:
        return fail(
            f"model_type is {v.shown(name)}: the library cannot tell which config class this is",
            f'write "model_type": "{look.release.mla_type(d) if d.form == "mla" else d.form}"',
        )
    known = look.release.knows_type(name)
    if known is None:
        return ok(f"{name} (no transformers beside the engine's source: not looked up)")
    if known:
        return ok(f"{name} is known to the engine's libraries")
    return fail(
        f"model_type {name!r} is known neither to the transformers beside {look.release.label} nor to it",
        f'write "model_type": "{look.release.mla_type(d) if d.form == "mla" else d.form}"',
    )


@finding("form.dialect")
def dialect(look: Look) -> Finding:
    d = look.drafter.dialect
    if not d.eagle3:
        return fail(f"this is {d.title}, not an EAGLE-3 drafter", "method eagle3 cannot serve it; give another folder")
    return ok(f"{d.title} ({d.writes})")


def method_of_path(path: str) -> str:
    """What vLLM makes of a drafter's path where no method is given (vllm/config/speculative.py: substring, in this
    order)."""
    low = path.lower()
    for part, method in (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark")):
        if part in low:
            return method
    return "draft_model"


KEPT = ("eagle", "dflash", "dspark", "medusa", "mtp", "ngram", "ngram_gpu", "suffix", "mlp_speculator")
"""Methods that the engine takes as given; what a path says counts for others (vllm/config/speculative.py)."""


@finding("form.method")
def method(look: Look) -> Finding:
    d, given = look.drafter, look.options.method
    if given is not None:
        if given == "eagle3":
            return ok("method eagle3, as given")
        if given not in KEPT and method_of_path(d.typed) == "eagle3":
            return warn(
                f"method {given!r} is given, but the engine lets the folder's name decide: eagle3", "use method eagle3"
            )
        why = f"architecture {d.declared}" + (", has d2t" if d.has("d2t") else "")
        return fail(f"method {given!r}, but the drafter is EAGLE-3 ({why})", "use method eagle3")
    made = method_of_path(d.typed)
    if made == "eagle3":
        return ok("no method given; the folder's name makes it eagle3")
    if made == "draft_model":
        end = "loads without a word as a plain draft model and dies at the first draft"
    else:
        end = f"looks for an {made} drafter"
    return warn(
        f"no method given: the path {d.typed!r} makes it {made!r}, and the engine {end}",
        'always pass "method": "eagle3", or name the folder ...-eagle3 (no "eagle-" anywhere in its path)',
    )


@finding("form.heads")
def heads(look: Look) -> Finding:
    d = look.drafter
    if d.heads is None:
        return skip("hidden_size or num_attention_heads cannot be read (form.config)")
    n, kv, dim = d.heads
    if n % kv:
        return fail(f"{n} heads are no multiple of {kv} key/value heads", "write the heads that were trained")
    hidden = d.size("hidden_size") or 0
    if d.form != "mla" and d.size("head_dim") is None and hidden % n:
        return fail(
            f"hidden_size {hidden} is no multiple of {n} heads and head_dim is absent",
            "write head_dim as trained (rows of q_proj / heads)",
        )
    if d.form != "mla" and dim % 2:
        return fail(f"head_dim {dim} is odd: rotary embeddings need pairs", "write head_dim as trained")
    return ok(f"{n} heads, {kv} of keys and values, head_dim {dim}")


@finding("form.draft_vocab")
def draft_vocab(look: Look) -> Finding:
    d = look.drafter
    declared = d.config.get("draft_vocab_size")
    full = d.size("vocab_size")
    if declared is not None and d.size("draft_vocab_size") is None:
        return fail(f"draft_vocab_size is {v.shown(declared)}", "write the number of rows of lm_head")
    if full is None or d.draft_vocab is None:
        return skip("vocab_size cannot be read (form.config)")
    if d.draft_vocab > full:
        return fail(
            f"draft_vocab_size {d.draft_vocab:,} is larger than vocab_size {full:,}",
            "a drafter proposes target tokens: 0 < draft_vocab_size <= vocab_size",
        )
    return ok(f"{d.draft_vocab:,} of {full:,} tokens" if d.draft_vocab < full else f"the whole vocabulary, {full:,}")


@finding("form.rope")
def rope(look: Look) -> Finding:
    found = read_rope(look.drafter.config)
    if isinstance(found, str):
        return fail(found, "write rope_parameters {rope_theta, rope_type, …} as trained")
    if found.layers and len({(r.theta, r.kind, r.extra) for r in found.layers.values()}) > 1:
        kinds = "; ".join(f"{k}: {r}" for k, r in found.layers.items())
        return fail(
            f"one rope per layer type ({kinds}); the drafter's class has one",
            "write the one rope that the drafter's layer was trained with, flat",
        )
    return ok(str(found))


@finding("form.mrope")
def mrope(look: Look) -> Finding:
    found = read_rope(look.drafter.config)
    if not isinstance(found, Rope) or not found.mrope:
        return ok("no multimodal rope keys")
    if look.target.multimodal:
        return ok("multimodal rope keys, and the target is multimodal")
    return warn(
        "mrope keys in the drafter, but the target is text-only",
        "take out mrope_section, mrope_interleaved and type mrope; engines differ in what they do with them",
    )


@finding("form.tie")
def tie(look: Look) -> Finding:
    d = look.drafter
    if d.config.get("tie_word_embeddings") is not True:
        return ok("not tied")
    if not d.has("lm_head.weight"):
        return ok("tied, and no lm_head of its own")
    return warn(
        "tie_word_embeddings is true, but the drafter has its own lm_head: transformers-based tools and SGLang "
        "overwrite it with the embedding",
        "write tie_word_embeddings: false",
    )


QUANT_DTYPES = ("F8_E4M3", "F8_E5M2", "U8", "I8", "F4", "I32")


@finding("form.quantisation")
def quantisation(look: Look) -> Finding:
    d = look.drafter
    q = d.config.get("quantization_config")
    packed = [n for n, t in d.tensors.items() if t.dtype in QUANT_DTYPES and n.endswith((".weight", ".qweight"))]
    scales = [n for n in d.tensors if n.endswith(("_scale", "_scale_inv", ".scales", ".qzeros", "_packed"))]
    if q is None and (packed or scales):
        return fail(
            f"{(packed or scales)[0]} is quantised, but config.json has no quantization_config",
            "write the quantization_config that the weights were made with, or export in bf16",
        )
    if q is not None and not isinstance(q, dict):
        return fail(f"quantization_config is {v.shown(q)}", "leave it out, or write the object")
    if isinstance(q, dict) and not (packed or scales):
        return warn(
            "config.json declares a quantization_config, but no tensor is quantised",
            "leave quantization_config out (it may have been copied from the target)",
        )
    return ok("not quantised" if q is None else f"quantised: {v.shown(q.get('quant_method'))}")


@finding("form.parallel")
def parallel(look: Look) -> Finding:
    d = look.drafter
    token = next((k for k in ("pard_token", "ptd_token_id", "mask_token_id") if d.raw.get(k) is not None), None)
    declared = d.dialect.name == "p-eagle" or ("eagle" in d.architecture.lower() and d.architecture.startswith("P"))
    if d.has("mask_hidden") and token is None:
        return fail(
            "mask_hidden is there, but no mask token (pard_token, ptd_token_id, mask_token_id)",
            "write the token id that was trained as the mask",
        )
    if declared and not d.has("mask_hidden"):
        return fail("a parallel-drafting config, but no mask_hidden tensor", "export the drafter with mask_hidden")
    if declared and d.has("mask_hidden"):
        return ok(f'parallel drafting with {token}; pass "parallel_drafting": true')
    return ok("one token per draft step")
