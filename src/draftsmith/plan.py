"""What a run will take, before anything runs: tokens, bytes, hours and memory, per stage and per choice.

    draftsmith plan RECIPE
    draftsmith plan --hidden-size 7168 --rows 10000 --tokens-per-row 1444 --extract-rate 3165

Every figure has a source: given, read from the target's config, measured by an earlier run, or assumed (and then the
assumption is spelled out). What cannot be known from what was given is None and named in `unknown`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError, nearest
from draftsmith.extract.sizes import CODECS, IDS, aux_bytes, teacher_bytes
from draftsmith.planning.rates import Machine, Rate, choose, measured, this_machine
from draftsmith.planning.sizes import DrafterShape, flops_per_token, target_params
from draftsmith.planning.train_memory import train_memory
from draftsmith.recipe import DRAFT_VOCAB, Recipe

STAGES = ("capture", "extract", "train")
WAYS = ("two passes", "one pass", "streaming")
ANSWER_SHARE = 0.6
"""Assumed length of an answer as a share of max_tokens, where nothing was captured yet."""
PROMPT_TOKENS = 150
"""Assumed prompt, tokens."""


@dataclass
class Figures:
    """All that a plan is made of. rates are tokens per second; supervised: share of a row's tokens with a teacher."""

    hidden_size: int | None = None
    layers: int | None = None
    vocab_size: int | None = None
    rows: int | None = None
    tokens_per_row: float | None = None
    supervised: float = 1.0
    aux_layers: int = 3
    codec: str = "bf16"
    topk: int = 128
    draft_vocab: int = 32000
    capture_rate: float | None = None
    extract_rate: float | None = None
    train_rate: float | None = None
    epochs: float = 3.0
    ttt_steps: int = 3
    batch_tokens: int = 2048
    optimizer: str = "adamw"
    dtype: str | None = None
    recompute: bool = False
    context_parallel: int = 1
    form: str = "llama"
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    drafter_hidden_size: int | None = None
    devices: int | None = None
    tflops: float | None = None
    folder: Path | None = None
    text: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


def _need(f: Figures, name: str, option: str) -> Any:
    value = getattr(f, name)
    if value is None:
        raise UserError(
            f"the plan needs {option}",
            "nothing given says how large the states or the data are",
            f"give --{option}, a recipe, or --target with a model's folder or config.json",
        )
    return value


def with_target(f: Figures, config: dict[str, Any]) -> Figures:
    """Sizes from a target's parsed config where they were not given."""
    from draftsmith.target.config import HIDDEN, LAYERS, VOCAB, size_of, text_config

    text = text_config(config)
    found = {
        "hidden_size": size_of(text, HIDDEN, "target"),
        "layers": size_of(text, LAYERS, "target"),
        "vocab_size": size_of(text, VOCAB, "target"),
        "intermediate_size": text.get("intermediate_size"),
        "num_attention_heads": text.get("num_attention_heads"),
        "num_key_value_heads": text.get("num_key_value_heads"),
        "head_dim": text.get("head_dim") or text.get("v_head_dim"),
    }
    new: dict[str, Any] = {k: v for k, v in found.items() if getattr(f, k) is None}
    sources = f.sources | dict.fromkeys(new, "the target's config")
    return replace(f, **new, text=text, sources=sources)


def _prompt_count(spec: str) -> int | None:
    """N of "source:N"; the lines of a JSONL file; None where only reading it would tell."""
    if found := re.search(r":(\d+)$", spec):
        return int(found.group(1))
    path = Path(spec).expanduser()
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    return None


def with_recipe(f: Figures, recipe: Recipe) -> Figures:
    """Figures of a recipe, and of what its run has measured, where they were not given (f.sources names the given)."""
    given, s = f.sources, dict(f.sources)
    new: dict[str, Any] = {}

    def put(name: str, value: Any, source: str) -> None:
        if given.get(name) != "given" and value is not None:
            new[name], s[name] = value, source

    put("codec", recipe.extract.codec, "the recipe")
    put("topk", recipe.extract.topk, "the recipe")
    put("draft_vocab", recipe.vocab.size or (None if recipe.train.from_ else DRAFT_VOCAB), "the recipe")
    put("epochs", recipe.train.epochs, "the recipe")
    put("ttt_steps", recipe.train.ttt_steps, "the recipe")
    put("batch_tokens", recipe.train.batch_tokens, "the recipe")
    put("optimizer", recipe.train.optimizer, "the recipe")
    put("dtype", recipe.train.dtype, "the recipe")
    put("recompute", recipe.train.recompute, "the recipe")
    put("context_parallel", recipe.train.context_parallel, "the recipe")
    put("form", recipe.drafter.form, "the recipe")
    put("drafter_hidden_size", recipe.drafter.hidden_size, "the recipe")
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        put(name, getattr(recipe.drafter, name), "the recipe")
    if recipe.extract.aux_layers:
        put("aux_layers", len(recipe.extract.aux_layers), "the recipe")
    done = measured(recipe.folder, "extract")
    if done.get("rows"):
        put("rows", done["rows"], "measured by extract")
        put("tokens_per_row", done["tokens"] / done["rows"], "measured by extract")
        put("supervised", done["supervised"] / done["tokens"], "measured by extract")
    else:
        counts = [_prompt_count(p) for p in recipe.capture.prompts]
        if all(c is not None for c in counts):
            put("rows", sum(c or 0 for c in counts) * recipe.capture.samples, "the recipe's prompt counts x samples")
        answer = ANSWER_SHARE * recipe.capture.max_tokens
        prompt = min(PROMPT_TOKENS, recipe.capture.max_prompt_tokens)
        put(
            "tokens_per_row",
            min(answer + prompt, recipe.extract.max_length),
            f"assumed: prompts of {prompt} tokens, answers of {ANSWER_SHARE:.0%} of max_tokens",
        )
        put("supervised", answer / (answer + prompt), "assumed with it")
    return replace(f, **new, sources=s, folder=recipe.folder)


def bytes_per_token(f: Figures, codec: str) -> float:
    """Bytes of states per token of a row, without the ids (8 bytes at most)."""
    hidden = _need(f, "hidden_size", "hidden-size")
    return aux_bytes(codec, f.aux_layers, hidden) + f.supervised * teacher_bytes(codec, hidden, f.topk, f.draft_vocab)


def _shape(f: Figures) -> DrafterShape | None:
    if None in (f.intermediate_size, f.num_attention_heads, f.vocab_size) or not f.hidden_size:
        return None
    heads = f.num_attention_heads or 1
    H = f.drafter_hidden_size or f.hidden_size
    return DrafterShape(
        hidden=H,
        target_hidden=f.hidden_size,
        aux_layers=f.aux_layers,
        vocab=f.vocab_size or 0,
        draft_vocab=f.draft_vocab,
        heads=heads,
        kv_heads=f.num_key_value_heads or heads,
        head_dim=f.head_dim or H // heads,
        intermediate=f.intermediate_size or 0,
        mla=_mla(f),
    )


def _mla(f: Figures) -> tuple[int, int, int, int, int] | None:
    """The target's latent sizes, where the drafter is of that form and the target's config is known."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if f.form != "mla" or not f.text.get("kv_lora_rank"):
        return None
    q_rank, rank, nope, rope, v = (int(f.text.get(k) or 0) for k in names)
    return q_rank, rank, nope, rope, v


def _stage(name: str, tokens: float, rate: Rate | None, **more: Any) -> dict[str, Any]:
    seconds = tokens / rate.value if rate else None
    return {
        "stage": name,
        "tokens": round(tokens),
        "tokens_per_second": round(rate.value, 1) if rate else None,
        "rate_source": rate.source if rate else None,
        "seconds": round(seconds) if seconds is not None else None,
        "minutes": round(seconds / 60, 1) if seconds is not None else None,
        "hours": round(seconds / 3600, 3) if seconds is not None else None,
        **more,
    }


def _choices(f: Figures, tokens: float, capture: dict[str, Any], extract: dict[str, Any]) -> list[dict[str, Any]]:
    """Way x codec: bytes on disk, the time until the states are there, and how much of it comes after the answers (None
    where a rate is not known). One pass has no top-k: the draft vocab is chosen from the answers afterwards."""
    answering, second = capture["seconds"], extract["seconds"]
    after = {"two passes": second, "one pass": 0, "streaming": second}
    out = []
    for way in WAYS:
        for codec in ("none",) if way == "streaming" else CODECS:
            if (way, codec) == ("one pass", "fp8-topk"):
                continue
            size = 0 if codec == "none" else round(tokens * bytes_per_token(f, codec))
            later = after[way]
            seconds = None if answering is None or later is None else answering + later
            out.append({"way": way, "codec": codec, "bytes": size, "seconds": seconds, "seconds_after_capture": later})
    return out


def make_plan(f: Figures, stage: str | None = None, machine: Machine | None = None) -> dict[str, Any]:
    """The forecast as one JSON-able dict. stage: one of capture, extract, train alone. UserError where even the size of
    the data is not known (for train alone, shapes are enough)."""
    if stage is not None and stage not in STAGES:
        close = nearest(stage, STAGES)
        hint = f"did you mean {close[0]!r}?" if close else f"stages with a forecast: {', '.join(STAGES)}"
        raise UserError(f"no forecast for stage {stage!r}", "", hint)
    machine = machine or this_machine(f.devices)
    if f.tflops:
        machine = replace(machine, flops=f.tflops * 1e12)
    shape = _shape(f)
    out: dict[str, Any] = {"machine": machine.name}
    stages: dict[str, dict[str, Any]] = {}
    if f.rows is None and stage == "train" and shape is not None:
        stages["train"] = _train(f, shape, None, machine)
    else:
        rows, per_row = _need(f, "rows", "rows"), _need(f, "tokens_per_row", "tokens-per-row")
        hidden, tokens = _need(f, "hidden_size", "hidden-size"), float(rows) * per_row
        each = bytes_per_token(f, f.codec)
        all_params, active = target_params(f.text) if f.text else (0, 0)
        done = {s: measured(f.folder, s) if f.folder else {} for s in STAGES}
        answers = tokens * f.supervised
        size = round(tokens * each)
        stages["capture"] = _stage(
            "capture", answers, choose(f.capture_rate, done["capture"], "decode", 2 * active, machine)
        )
        stages["extract"] = _stage(
            "extract",
            tokens,
            choose(f.extract_rate, done["extract"], "prefill", 2 * active, machine),
            codec=f.codec,
            bytes=size,
            bytes_per_token=round(each),
            memory={"target_weights": 2 * all_params} if all_params else None,
        )
        if shape is not None:
            stages["train"] = _train(f, shape, tokens, machine, done["train"])
        out |= {
            "rows": rows,
            "tokens": round(tokens),
            "hidden_size": hidden,
            "codec": f.codec,
            "bytes_per_token": round(each),
            "bytes": size,
            "gigabytes": round(size / 1e9, 1),
            "id_bytes": round(IDS * tokens * (1 + f.supervised)),
            "choices": _choices(f, tokens, stages["capture"], stages["extract"]),
        }
    out["stages"] = {k: v for k, v in stages.items() if stage in (None, k)}
    out["sources"] = f.sources
    out["unknown"] = [
        f"{s}: needs {_lacks(f, s, shape)}" for s in STAGES if stage in (None, s) and not _known(stages, s)
    ]
    return out


def _known(stages: dict[str, dict[str, Any]], name: str) -> bool:
    return (stages.get(name) or {}).get("seconds") is not None


def _lacks(f: Figures, name: str, shape: DrafterShape | None) -> str:
    if name != "train":
        return f"the target's config (--target) or --{name}-rate"
    if shape is None:
        return "the target's config (--target), or --vocab-size, --intermediate-size and --num-attention-heads"
    return "--rows and --tokens-per-row"


def _train(
    f: Figures, shape: DrafterShape, tokens: float | None, machine: Machine, done: dict[str, Any] | None = None
) -> dict[str, Any]:
    dtype = f.dtype or ("bfloat16" if machine.is_gpu else "float32")
    work = flops_per_token(shape, f.ttt_steps, full_teacher=f.codec != "fp8-topk")
    memory = train_memory(
        shape,
        f.batch_tokens,
        f.ttt_steps,
        f.optimizer,
        dtype,
        supervised=f.supervised,
        recompute=f.recompute,
        gpu=machine.is_gpu,
        context=f.context_parallel,
    )
    rate = choose(f.train_rate, done or {}, "train", work, machine)
    fits = None if machine.memory is None else memory["total"] <= machine.memory
    more = {
        "parameters": {"fc": shape.fc, "layer": shape.layer, "lm_head": shape.head, "trained": shape.trained},
        "memory": memory | {"device": machine.memory, "fits": fits},
        "flops_per_token": work,
        "dtype": dtype,
        "optimizer": f.optimizer,
    }
    if tokens is None:
        return {"stage": "train", "tokens_per_second": round(rate.value, 1) if rate else None, "seconds": None, **more}
    return _stage("train", tokens * f.epochs, rate, **more)
