"""The runner that will serve the target, and the aux layer ids that it will really use, with their meaning.

vLLM's two model runners look for the ids in different keys (V1: top level, then nested `eagle_config`; V2: top level,
then `eagle_config.layer_ids`), sort them and drop repeats, and fall back to a default without a word.
"""

from __future__ import annotations

from draftsmith.check import values as v
from draftsmith.check.dialect import meaning
from draftsmith.check.form_tensors import aux_count
from draftsmith.check.look import Finding, Look, fail, finding, ok, skip, warn

LAST_ON_OLD_CLASSES = "kimi, deepseek"


def said(k: int, layers: int | None) -> str:
    """An id and its meaning in vLLM."""
    if k == 0:
        return "0 = the embeddings"
    if layers is not None and k == layers:
        return f"{k} = after the last layer, before the final norm"
    return f"{k} = stream entering layer {k} = output of layer {k - 1}"


@finding("runner.which")
def which(look: Look) -> Finding:
    if not look.release.is_vllm:
        return ok(f"{look.release.label} has one model runner")
    if look.ctx.target_config is None:
        return skip("no target given")
    runner, why, evidence = look.release.runner(look.drafter, look.target, look.options)
    if runner is None:
        one, two = (look.release.ids_for(r, look.drafter, look.target) for r in ("v1", "v2"))
        same = "both use the same ids" if one.ids == two.ids else f"V1 would use {one.ids}, V2 {two.ids}"
        return ok(f"V1 or V2: {why}; {same}", evidence)
    return ok(why, evidence)


def _written(look: Look) -> tuple[list[int] | None, str]:
    d = look.drafter
    if d.top_ids:
        return d.top_ids, "top level"
    if d.nested_ids:
        return d.nested_ids, "eagle_config"
    return None, "nowhere"


@finding("form.aux_ids")
def aux_ids(look: Look) -> Finding:
    """The ids as written: what any engine would make of them."""
    t = look.target
    ids, where = _written(look)
    n = t.layers
    if n is None:
        return skip("the target's number of layers cannot be read")
    if ids is None:
        default = (2, n // 2, n - 3)
        if len(set(default)) < 3 or min(default) < 0:
            return fail(
                f"no ids are written, and the default for {n} layers, {default}, is not three distinct layers: the "
                "engine drops repeats, and fc no longer fits",
                "write the ids that were trained; a target needs 7 layers for the default",
            )
        return ok(f"none written: every engine takes {default}, as the producers of such files train")
    shift = 0 if meaning(ids, n, look.drafter.dialect) != "output" else 1
    if len(set(ids)) != len(ids):
        return fail(f"{ids} ({where}) names a layer twice: the engine drops repeats, and fc no longer fits",
                    "write distinct ids, as trained")  # fmt: skip
    if ids != sorted(ids):
        return fail(f"{ids} ({where}) is not ascending: the engine sorts, so fc would get its blocks in another order",
                    "reorder fc's column blocks with the ids, or train in ascending order")  # fmt: skip
    outside = [i for i in ids if not 0 <= i + shift <= n]
    if outside:
        return fail(
            f"{ids} ({where}): {outside[0]} is outside 0 … {n}: that state is never captured, and the first forward fails",
            "the drafter was made for a deeper target, or the ids are wrong",
        )
    count, _ = aux_count(look)
    fc, wide = look.drafter.shape("fc.weight"), t.hidden
    made_for = fc[1] // wide if fc and len(fc) == 2 and wide and fc[1] % wide == 0 else count
    if len(ids) != made_for:
        return fail(f"{len(ids)} ids ({where}), but fc is made for {made_for} aux states", "write the ids as trained")
    twice = look.drafter.top_ids and look.drafter.nested_ids
    if twice and look.drafter.top_ids not in (look.drafter.nested_ids, [i + 1 for i in look.drafter.nested_ids or []]):
        return warn(
            f"top level {look.drafter.top_ids} and eagle_config {look.drafter.nested_ids} disagree; the top level wins",
            "write one list, at top level",
        )
    return ok(f"{ids} ({where}), ascending, distinct, within 0 … {n}")


@finding("runner.aux_ids")
def used(look: Look) -> Finding:
    """The ids that will really be used, against what the written ones mean."""
    d, t, release = look.drafter, look.target, look.release
    if not release.is_vllm:
        return _sglang(look)
    if not d.use_aux:
        return ok("use_aux_hidden_state is false: the last state only")
    ids, where = _written(look)
    u = release.used_ids(d, t, look.options)
    if u.ids is None:
        if "V1 would use" in u.why:
            return warn(
                f"the two runners would use different layers: {u.why}",
                "write the ids at top level, in vLLM's meaning: both runners read them there",
                u.evidence,
            )
        return skip(u.why)
    plain = f"the {u.runner} runner uses {list(u.ids)} ({u.why}): " + "; ".join(said(k, t.layers) for k in u.ids)
    if ids is None:
        return ok(plain, u.evidence)
    kind = meaning(ids, t.layers, d.dialect)
    if look.contract and look.contract.aux_layer_ids == ids:
        kind = "entering"  # the contract's ids are in this meaning, whatever they look like
    meant = tuple(sorted({i + 1 for i in ids} if kind == "output" else set(ids)))
    if u.ids == meant:
        note = f"; {ids} in {where} count outputs, so these are the layers meant" if kind == "output" else ""
        return ok(plain + note, u.evidence)
    fix = f"write eagle_aux_hidden_state_layer_ids: {list(meant)} at top level, and num_aux_hidden_states: {len(meant)}"
    if kind == "output" and u.ids == tuple(sorted(set(ids))):
        # At top level the engine's meaning is the rule, so the producers' default there is only suspicious.
        return (warn if where == "top level" else fail)(
            f"{ids} in {where} count the outputs of layers (SGLang's meaning), but {plain}: one layer too early",
            fix + " (draftsmith remedy writes such a folder)",
            u.evidence,
        )
    if kind == "unsaid" and u.where != "default":
        return ok(plain + "; nothing says in which meaning they were trained", u.evidence)
    status = warn if kind == "unsaid" else fail
    return status(f"{ids} is written in {where}, but {plain}", fix, u.evidence)


def _sglang(look: Look) -> Finding:
    d, t = look.drafter, look.target
    if d.nested_ids:
        kind = meaning(d.nested_ids, t.layers, d.dialect)
        if kind == "entering" and d.nested_ids[0] != 1 and max(d.nested_ids) != t.layers:
            return warn(
                f"{d.nested_ids} in eagle_config seem to count entering streams (vLLM's meaning); most SGLang classes "
                "add 1",
                f"write {[i - 1 for i in d.nested_ids]} in eagle_config for SGLang",
            )
        return ok(f"{d.nested_ids} in eagle_config, outputs of layers")
    if d.top_ids:
        default = [2, (t.layers or 0) // 2, (t.layers or 0) - 3]
        if d.top_ids == default:
            return ok(f"SGLang ignores the top-level {d.top_ids}; its default is the same")
        return fail(
            f"SGLang does not read the top-level {d.top_ids} and uses its default {default}",
            f"draftsmith convert --to sglang writes eagle_config with {[i - 1 for i in d.top_ids]}",
        )
    return ok("none written: SGLang's default")


@finding("runner.blocks")
def blocks(look: Look) -> Finding:
    """On the CPU a latent-attention cache and a cache of heads have no block size in common (vllm/v1/worker/utils.py)."""
    d, t, release = look.drafter, look.target, look.release
    platform = look.options.platform or release.facts.platform
    latent = v.integer(t.text, "kv_lora_rank") is not None
    taken = release.mla_types
    drafts_latent = d.form == "mla" and (taken is None or d.model_type in taken[0])
    if not release.is_vllm or platform != "cpu" or latent == drafts_latent:
        return ok("one kind of cache" if latent == drafts_latent else "two kinds of cache, which a GPU serves together")
    if release.cpu_blocks is None:
        return ok("two kinds of cache, with a block size in common")
    (fixed, multiple), evidence = [size for _, size in release.cpu_blocks[0]], release.cpu_blocks[1]
    one, other = ("target", "drafter") if latent else ("drafter", "target")
    return fail(
        f"the {one} has latent attention (blocks of {fixed} on the CPU), the {other} has not (multiples of {multiple}): "
        f"{release.label} stops with 'No common block size'",
        "a GPU; or, for a target with latent attention, an MLA drafter",
        evidence,
    )


@finding("runner.last_layer")
def last_layer(look: Look) -> Finding:
    """Older decoder loops capture before each layer, so the state after the last one is never taken (vllm#46788)."""
    d, t, release = look.drafter, look.target, look.release
    if not release.is_vllm or t.layers is None:
        return ok("not vLLM, or the number of layers is not known")
    u = release.used_ids(d, t, look.options)
    if u.ids is None or t.layers not in u.ids:
        return ok("no id after the last layer")
    captures, evidence = release.captures_last(t)
    if captures is False:
        return fail(
            f"id {t.layers} is after the last layer, and this class captures before each layer only: two states for "
            f"{len(u.ids)}",
            "a later vLLM (0.26 for DeepSeek and Kimi), or a drafter trained on earlier layers",
            evidence,
        )
    return ok(f"id {t.layers} is captured after the last layer", evidence)


@finding("runner.multimodal")
def multimodal(look: Look) -> Finding:
    d, t, release = look.drafter, look.target, look.release
    if not t.multimodal or not release.is_vllm:
        return ok("a text-only target" if not t.multimodal else f"{release.label} is not asked")
    runner, _, _ = release.runner(d, t, look.options)
    if runner == "v2":
        return ok("the V2 runner needs no image token id")
    if "image_token_index" in t.raw:
        return ok("the target's config names its image token (image_token_index)")
    known, evidence = release.knows_image_token(t.architecture or "")
    if known:
        return ok(f"the V1 runner knows {t.architecture}'s image token", evidence)
    return fail(
        f"the V1 runner has no image token for {t.architecture}, and its config has no image_token_index: "
        "AttributeError while the drafter is loaded",
        'add "image_token_index" by --hf-overrides, or use the V2 runner (VLLM_USE_V2_MODEL_RUNNER=1)',
        evidence,
    )
