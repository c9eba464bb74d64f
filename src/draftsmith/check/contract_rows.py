"""Drafter and target against contract.json: what was trained, compared with what will be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.check.look import Finding, Look, fail, finding, ok, skip, warn
from draftsmith.check.rope import read_rope
from draftsmith.contract import Contract


def tokenizer_hash(folder: Path) -> str | None:
    """Hash of a folder's tokenizer; None where it holds none."""
    from draftsmith.target.tokenizer import FILES
    from draftsmith.target.tokenizer import tokenizer_hash as of

    return of(folder) if any((folder / name).is_file() for name in FILES) else None


def _contract(look: Look) -> Contract:
    assert look.contract is not None, "the catalog says that this check needs a contract"
    return look.contract


def _differing(pairs: dict[str, tuple[Any, Any]]) -> list[str]:
    """Names with both values, of those that differ; None = not decided."""
    return [
        f"{name}: {a!r} trained, {b!r} now"
        for name, (a, b) in pairs.items()
        if a is not None and b is not None and a != b
    ]


@finding("pair.target")
def target(look: Look) -> Finding:
    from draftsmith.target.config import config_hash

    was, t = _contract(look).target, look.target
    # Not facts_of: where a size is absent it asks transformers, which takes seconds to import.
    inner = t.text.get("model_type") or t.raw.get("model_type")
    now = {
        "architecture": t.architecture,
        "model_type": inner,
        "outer_model_type": t.raw.get("model_type") or inner,
        "hidden_size": t.hidden,
        "num_layers": t.layers,
        "vocab_size": t.vocab,
    }
    if wrong := _differing({k: (getattr(was, k), value) for k, value in now.items()}):
        return fail(f"the contract is for {was.name}: " + "; ".join(wrong), "give the target that was captured")
    if was.config_hash != (hashed := config_hash(t.raw)):
        return warn(
            f"same architecture and sizes as {was.name}, but another config.json (hash {was.config_hash[:12]}… trained, "
            f"{hashed[:12]}… now)",
            "compare the two configs (rope, revision, quantisation); another revision may write other answers",
        )
    return ok(f"{was.name}, {was.architecture}, the config that was captured")


@finding("pair.template")
def template(look: Look) -> Finding:
    was = _contract(look).chat_template_hash
    if was is None:
        return ok("captured without a chat template")
    if look.target.folder is None:
        return skip("no target folder")
    from draftsmith.target.tokenizer import chat_template_hash

    now = chat_template_hash(look.target.folder)
    if now is None:
        return skip("the target's folder holds no chat template")
    if now != was:
        return warn(
            f"the target's chat template is not the one that was captured with (hash {was[:12]}…, now {now[:12]}…)",
            "serve with the captured template (--chat-template), or expect lower acceptance",
        )
    return ok("the captured template")


@finding("pair.aux_ids")
def aux_ids(look: Look) -> Finding:
    trained = _contract(look).aux_layer_ids
    if trained is None:
        return skip("the contract does not say")
    if look.ctx.target_config is None:
        return skip("no target given")
    used = look.release.used_ids(look.drafter, look.target, look.options)
    if used.ids is None:
        return skip(f"the ids that will be used are not known ({used.why})")
    if list(used.ids) == sorted(set(trained)):
        return ok(f"trained and used: {trained}")
    return fail(
        f"trained on layers {trained}, but the {used.runner} runner will use {list(used.ids)} ({used.why})",
        f"write eagle_aux_hidden_state_layer_ids: {trained} at top level, and num_aux_hidden_states: {len(trained)}",
        used.evidence,
    )


@finding("pair.norms")
def norms(look: Look) -> Finding:
    was = _contract(look).norms
    if was is None:
        return skip("the contract does not say")
    now = look.drafter.switches
    default_residual = look.drafter.speculators and "norm_before_residual" not in look.drafter.config
    pairs = {
        k: (getattr(was, k), on) for k, on in now.items() if not (k == "norm_before_residual" and default_residual)
    }
    if wrong := _differing(pairs):
        return fail("; ".join(wrong) + ": loads without a word, accepts less", "write the switches as trained")
    return ok("the switches that were trained")


@finding("pair.trained_rope")
def trained_rope(look: Look) -> Finding:
    was = _contract(look).rope
    if was is None:
        return skip("the contract does not say")
    trained, now = read_rope({"rope_parameters": was}), read_rope(look.drafter.config)
    if isinstance(trained, str) or isinstance(now, str):
        return skip(f"a rope cannot be read: {trained if isinstance(trained, str) else now}")
    if trained.same(now):
        return ok(f"the rope that was trained: {trained}")
    return fail(
        f"trained with {trained}; the config gives {now}: no engine compares them",
        "write rope_parameters, and rope_theta with rope_scaling, as trained",
    )


@finding("pair.sizes")
def sizes(look: Look) -> Finding:
    c, d = _contract(look), look.drafter
    pairs: dict[str, tuple[Any, Any]] = {"draft_vocab_size": (c.draft_vocab_size, d.draft_vocab)}
    if c.sizes is not None:
        heads = d.heads or (None, None, None)
        pairs |= {
            "form": (c.sizes.form, "mla" if d.form == "mla" else "llama"),
            "hidden_size": (c.sizes.hidden_size, d.size("hidden_size")),
            "num_layers": (c.sizes.num_layers, d.size("num_hidden_layers")),
            "num_attention_heads": (c.sizes.num_attention_heads, heads[0]),
            "num_key_value_heads": (c.sizes.num_key_value_heads, heads[1]),
            "intermediate_size": (c.sizes.intermediate_size, d.size("intermediate_size")),
        }
        if d.form != "mla":
            pairs["head_dim"] = (c.sizes.head_dim, heads[2])
    if wrong := _differing(pairs):
        return fail("; ".join(wrong), "the config is not this drafter's: export it again")
    return ok("the contract's sizes")


LARGEST_VOCABULARY = 1 << 24
"""Beyond it a config is broken, or made to fill the memory with a map."""


@finding("pair.map")
def vocab_map(look: Look) -> Finding:
    import numpy as np

    was = _contract(look).vocab_map_hash
    full = look.drafter.size("vocab_size")
    if was is None:
        return skip("the contract does not say")
    if look.d2t is None or look.drafted is None or full is None:
        return skip("no sound map (form.map)")
    if not look.drafted or not 0 <= min(look.drafted) <= max(look.drafted) < full:
        return skip("the map leaves the vocabulary (form.map_values)")
    if full > LARGEST_VOCABULARY:
        return fail(
            f"vocab_size is {full:,}: no vocabulary is so large", "the config is broken: export the drafter again"
        )
    from draftsmith.vocab.map import VocabMap

    mask = np.zeros(full, dtype=bool)
    mask[look.drafted] = True
    now = VocabMap(np.array(look.d2t, dtype=np.int64), mask).hash()
    if now != was:
        return fail(
            f"the map is not the one that was trained (hash {was[:12]}…, here {now[:12]}…): lm_head's rows name other tokens",
            "take d2t and t2d from the run's vocab stage, or export again",
        )
    return ok("the map that was trained")
