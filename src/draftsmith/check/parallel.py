"""What the launch adds: tensor and pipeline parallelism, number of draft tokens, memory per device."""

from __future__ import annotations

from draftsmith.check import values as v
from draftsmith.check.headers import BITS
from draftsmith.check.look import Finding, Look, fail, finding, ok, skip, warn


@finding("pair.tensor_parallel")
def tensor_parallel(look: Look) -> Finding:
    tp = look.options.tensor_parallel
    d, t = look.drafter, look.target
    if tp < 1:
        return fail(f"tensor parallel size {tp}", "give 1 or more")
    if tp == 1:
        return ok("one device")
    for name, pair in (("target", t.heads), ("drafter", d.heads[:2] if d.heads else None)):
        if pair is None:
            return skip(f"the {name}'s heads cannot be read")
        n, kv = pair
        if n % tp:
            return fail(
                f"the {name}'s {n} heads cannot be split over {tp} devices",
                "another --tensor-parallel" + (', or "draft_tensor_parallel_size": 1' if name == "drafter" else ""),
            )
        if max(kv, tp) % min(kv, tp):
            return fail(
                f"the {name}'s {kv} key/value heads and {tp} devices do not divide", "another --tensor-parallel"
            )
    rows = d.draft_vocab or 0
    if rows and rows % tp:
        return warn(
            f"{rows:,} draft tokens over {tp} devices leave padding rows", "a draft vocabulary of a multiple of 64"
        )
    return ok(
        f"{d.heads[0] if d.heads else '?'} drafter heads and {t.heads[0] if t.heads else '?'} target heads over {tp}"
    )


@finding("pair.pipeline_parallel")
def pipeline_parallel(look: Look) -> Finding:
    pp = look.options.pipeline_parallel
    if pp <= 1:
        return ok("one stage")
    supported, evidence = look.release.supports_pipeline(look.target)
    if supported:
        return ok(f"{pp} stages; the target's class hands aux states on", evidence)
    return fail(
        f"{pp} pipeline stages: {look.release.label} does not hand the target's aux states from stage to stage",
        "tensor parallelism, or a release and model class that declare supports_aux_hidden_states_over_pp",
        evidence,
    )


@finding("runner.tokens")
def tokens(look: Look) -> Finding:
    n = look.options.num_speculative_tokens
    if n is None:
        return ok("not given: pass num_speculative_tokens (3 is common), the engine demands it")
    if n < 1:
        return fail(f"num_speculative_tokens is {n}", "give 1 or more")
    steps = look.contract.ttt_steps if look.contract else None
    if steps and n > 2 * steps + 1:
        return warn(
            f"{n} draft tokens from a drafter trained for {steps} steps: the later ones are rarely accepted",
            f"num_speculative_tokens {steps} to {2 * steps}",
        )
    return ok(f"{n} draft tokens a step")


def _gib(n: float) -> str:
    return f"{n / 2**30:,.2f} GiB" if n >= 2**28 else f"{n / 2**20:,.1f} MiB"


def drafter_kv_bytes(look: Look) -> int | None:
    """Bytes of 16-bit cache per token of the drafter, all devices together."""
    d = look.drafter
    layers = d.size("num_hidden_layers")
    rank, rope = v.integer(d.config, "kv_lora_rank"), v.integer(d.config, "qk_rope_head_dim")
    if layers is None or d.heads is None:
        return None
    if d.form == "mla" and rank and rope:
        return layers * (rank + rope) * 2
    return layers * 2 * d.heads[1] * d.heads[2] * 2


@finding("pair.memory")
def memory(look: Look) -> Finding:
    d, t, tp = look.drafter, look.target, max(look.options.tensor_parallel, 1)
    length = look.options.max_model_len or t.max_positions
    target_kv, drafter_kv = t.kv_bytes_per_token, drafter_kv_bytes(look)
    weights = t.weights.nbytes if not t.weights.problems else 0
    drafter_bytes = sum(
        (x.end - x.start) * 16 // BITS[x.dtype] if x.dtype == "F32" else x.end - x.start for x in d.tensors.values()
    )
    if target_kv is None or length is None:
        return skip("the target's sizes do not give its cache")
    # A compressed (MLA) cache is on every device whole; heads are shared out, at least one a device.
    mla = v.integer(t.text, "kv_lora_rank") is not None
    heads = t.heads[1] if t.heads else 1
    share = 1 if mla else min(tp, heads)
    draft_share = 1 if d.form == "mla" else min(tp, d.heads[1] if d.heads else 1)
    per_token = target_kv / share + (drafter_kv or 0) / draft_share
    parts = [
        f"target weights {_gib(weights / tp)}" if weights else "target weights not here",
        f"drafter {_gib(drafter_bytes / tp)}",
        f"cache {per_token / 1024:,.1f} KiB a token ({100 * (drafter_kv or 0) / draft_share / per_token:.0f} % the "
        f"drafter's), {_gib(per_token * length)} for one request of {length:,}",
    ]
    text = f"per device of {tp}: " + ", ".join(parts)
    limit = look.options.gpu_memory
    need = weights / tp + drafter_bytes / tp + per_token * length
    if limit and weights and need > 0.95 * limit:
        return fail(f"{text}; together {_gib(need)} of {_gib(limit)}", "more devices, or a shorter --max-model-len")
    return ok(text)
