"""Reads a drafter of any dialect into native names and words, strictly; every patch is named in `notes`.

What is patched: stray prefixes, `midlayer.`, fused q/k/v and gate/up, a map in absolute ids or another integer type, a
missing t2d, the map's absence where draft and target vocabulary are equal, aux ids in SGLang's meaning, old and new
rope keys, nested speculators configs. What is not understood is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.check.dialect import meaning
from draftsmith.check.drafter import Drafter, canonical
from draftsmith.check.headers import read_weights
from draftsmith.check.inputs import load_json
from draftsmith.check.rope import read_rope
from draftsmith.contract import FILE as CONTRACT
from draftsmith.contract import Contract, NormSwitches
from draftsmith.dialects import native
from draftsmith.dialects.checkpoint import Checkpoint, load_tensors, require_inventory, require_map, require_sane_map
from draftsmith.drafter.config import FILE as NATIVE
from draftsmith.drafter.config import DrafterConfig, MlaSizes
from draftsmith.errors import UserError

DROPPED = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.", "optimizer.", "lm_head_teacher.")
"""First parts of tensors that belong to a trainer, not to the drafter (speculators keeps the verifier's norm)."""

LEGACY_NAMES = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
"""Names that SGLang still maps (sglang/srt/models/llama_eagle3.py: load_weights)."""

ROPES = ("default", "linear", "llama3", "yarn")
INTEGER_ROPE_KEYS = ("original_max_position_embeddings",)
Meaning = Literal["entering", "output"]


def read(
    folder: Path,
    *,
    allow_pickle: bool = False,
    aux_meaning: Meaning | None = None,
    aux_layers: list[int] | None = None,
    target_layers: int | None = None,
) -> Checkpoint:
    """Read a drafter folder of any dialect.

    aux_meaning: what the file's ids count, where it cannot be inferred. aux_layers: the ids themselves (our meaning),
    where the file has none or wrong ones. target_layers: the target's depth, which settles inference and defaults.
    Raises UserError on anything missing, unexpected, misshapen or not understood."""
    if not folder.is_dir():
        raise UserError(f"there is no drafter at {folder}", "", "give the folder that holds its config.json")
    if (folder / NATIVE).exists():
        return native.read(folder)
    config = load_json(folder / "config.json")
    weights = read_weights(folder)
    if weights.problems:
        raise UserError(
            f"{folder}: {weights.problems[0]}",
            "such files are broken, or made to be read otherwise than they look",
            "copy the drafter's folder again; draftsmith check names everything that is wrong with it",
        )
    drafter = Drafter(folder, str(folder), config, weights)
    if not drafter.dialect.eagle3:
        raise UserError(
            f"{folder} is {drafter.dialect.title}, not an EAGLE-3 drafter",
            "its graph is another one",
            "give an EAGLE-3 drafter's folder (an ordinary model is a target: --target)",
        )
    notes = [f"read as {drafter.dialect.title}"]
    tensors = _rename(_load(folder, allow_pickle), notes)
    contract = Contract.load(folder) if (folder / CONTRACT).exists() else None
    if contract is not None and target_layers is None:
        target_layers = contract.target.num_layers
    ids = aux_layers or _aux_ids(drafter, aux_meaning, target_layers, contract, notes)
    out = _config(drafter, tensors, ids, notes)
    tensors = _split_fused(out, tensors, notes)
    if out.attention_bias and "layers.0.self_attn.o_proj.bias" not in tensors:
        tensors["layers.0.self_attn.o_proj.bias"] = torch.zeros(out.hidden_size, dtype=tensors["fc.weight"].dtype)
        notes.append("o_proj.bias was missing beside attention_bias: zeros (the engine would leave it uninitialised)")
    _mend_map(out, tensors, notes, str(folder))
    require_inventory(out, tensors, str(folder))
    require_map(out, tensors, str(folder))
    return Checkpoint(out, tensors, contract, notes)


def _load(folder: Path, allow_pickle: bool) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if files:
        tensors: dict[str, Tensor] = {}
        for path in files:
            tensors |= load_tensors(path)
        return tensors
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
    if not pickles:
        raise UserError(
            f"{folder} has no *.safetensors", "there are no weights to read", "give the folder that holds them"
        )
    if not allow_pickle:
        raise UserError(
            f"{folder} holds its weights as a pickle ({pickles[0].name})",
            "a pickle can run code when it is read",
            "if you trust its source, repeat with --allow-pickle: it is then read by torch's weights-only reader",
        )
    tensors = {}
    for path in pickles:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as e:
            raise UserError(
                f"{path} cannot be read as weights alone: {e}",
                "it holds more than tensors",
                "ask for a safetensors file",
            ) from e
        tensors |= {k: t for k, t in found.items() if isinstance(t, Tensor)}
    return tensors


def _rename(tensors: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    stray: set[str] = set()
    dropped: list[str] = []
    for name, tensor in tensors.items():
        new, prefix = canonical(name)
        for old, legacy in LEGACY_NAMES.items():
            new = new.replace(old, legacy)
        if prefix:
            stray.add(prefix)
        if new.startswith(DROPPED):
            dropped.append(name)
            continue
        if new in out:
            raise UserError(f"two tensors are both {new!r}", "it is not clear which one counts", "remove one of them")
        out[new] = tensor
    if stray:
        notes.append(f"stripped prefix {', '.join(sorted(stray))}")
    if dropped:
        notes.append(f"left out {', '.join(sorted(dropped))}: the trainer's, not the drafter's")
    return out


def _aux_ids(
    drafter: Drafter, given: Meaning | None, layers: int | None, contract: Contract | None, notes: list[str]
) -> list[int] | None:
    ids = drafter.top_ids if drafter.top_ids is not None else drafter.nested_ids
    signed = contract.aux_layer_ids if contract else None
    if given is None and signed is not None and ids in (None, signed, [i - 1 for i in signed]):
        notes.append(f"aux ids {signed} (our meaning) are the contract's; the file writes {ids}")
        return signed
    if ids is None:
        if layers is None:
            return None
        default = [2, layers // 2, layers - 3]
        notes.append(f"no aux ids in the file: took the reference default {default} for {layers} layers")
        return default
    means = given or meaning(ids, layers, drafter.dialect)
    told = given is not None or layers is not None or drafter.top_ids is not None or bool(drafter.dialect.signed)
    if means == "unsaid" or (not told and ids[0] not in (1, 2)):
        raise UserError(
            f"it is not clear what the aux ids {ids} count",
            "id k is the stream entering layer k in vLLM, the output of layer k in SGLang: one layer apart",
            "give --target, or --aux-meaning entering|output",
        )
    if not told:
        means = "output" if ids[0] == 1 else "entering"
    if means == "output":
        moved = [i + 1 for i in ids]
        notes.append(f"aux ids {ids} count layer outputs (SGLang's meaning): {moved} in ours")
        return moved
    notes.append(f"aux ids {ids} count the stream entering a layer (vLLM's meaning): kept")
    return ids


def _rope(config: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    rope = read_rope(config)
    if isinstance(rope, str):
        raise UserError(
            f"the rope cannot be read: {rope}", "the drafter would rotate by other angles", "mend config.json"
        )
    if rope.kind not in ROPES:
        raise UserError(
            f"rope type {rope.kind!r}",
            f"draftsmith's drafters know {', '.join(ROPES)}",
            "this drafter cannot be converted",
        )
    if rope.mrope:
        notes.append("left out the multimodal rope keys (mrope): the drafter rotates by text positions")
    if not rope.written:
        notes.append(f"no rope keys: theta {rope.theta:g}, the engine's default")
    extra = {k: int(v) if k in INTEGER_ROPE_KEYS else v for k, v in rope.extra}
    return {"rope_theta": rope.theta, "rope_type": rope.kind} | extra


def _need(drafter: Drafter, key: str) -> int:
    value = drafter.size(key)
    if value is None:
        raise UserError(f"{drafter.folder / 'config.json'}: {key} is missing or no size", "", "add it")
    return value


def _config(drafter: Drafter, tensors: dict[str, Tensor], ids: list[int] | None, notes: list[str]) -> DrafterConfig:
    c = drafter.config
    if drafter.form == "qwen3":
        raise UserError(
            "a Qwen3-form drafter (q_norm, k_norm in its attention)",
            "draftsmith's forms are Llama and MLA",
            "serve it as it is; it cannot be converted",
        )
    if _need(drafter, "num_hidden_layers") != 1:
        raise UserError(
            f"a drafter of {drafter.size('num_hidden_layers')} layers", "draftsmith's drafters have one", ""
        )
    if "mask_hidden" in tensors:
        raise UserError("a P-EAGLE drafter (mask_hidden)", "it drafts in parallel, another graph", "serve it as it is")
    hidden, fc = _need(drafter, "hidden_size"), tensors.get("fc.weight")
    if fc is None or fc.dim() != 2:
        raise UserError(
            "fc.weight is missing or no matrix", "without it there is no EAGLE-3 drafter", "give the whole checkpoint"
        )
    target_hidden = drafter.size("target_hidden_size") or hidden
    if fc.shape[1] % target_hidden:
        raise UserError(
            f"fc.weight is {tuple(fc.shape)}, not a multiple of the target's width {target_hidden}",
            "the number of aux layers does not follow",
            "set target_hidden_size in config.json",
        )
    n = _need(drafter, "num_attention_heads")
    kv = drafter.size("num_key_value_heads") or n
    vocab = _need(drafter, "vocab_size")
    head = tensors.get("lm_head.weight")
    draft = drafter.size("draft_vocab_size") or (head.shape[0] if head is not None else vocab)
    mla = None
    if drafter.form == "mla":
        keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        mla = MlaSizes(**{k: drafter.size(k) for k in keys})  # type: ignore[arg-type]
    q = tensors.get("layers.0.self_attn.q_proj.weight")
    head_dim = drafter.size("head_dim") or (q.shape[0] // n if q is not None and mla is None else hidden // n)
    if not drafter.size("head_dim") and head_dim != hidden // n:
        notes.append(f"head_dim {head_dim} taken from q_proj, not hidden_size/heads = {hidden // n}")
    if "norm_before_residual" not in c:
        notes.append("norm_before_residual is not written: took False, the trainers' default")
    eps = c.get("rms_norm_eps", 1e-6)
    return DrafterConfig(
        form="mla" if mla else "llama",
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        num_aux_layers=fc.shape[1] // target_hidden,
        aux_layer_ids=ids,
        vocab_size=vocab,
        draft_vocab_size=draft,
        num_attention_heads=n,
        num_key_value_heads=kv,
        head_dim=head_dim,
        intermediate_size=_need(drafter, "intermediate_size"),
        rms_norm_eps=float(eps),
        attention_bias=bool(c.get("attention_bias", False)),
        rope=_rope(c, notes),
        max_position_embeddings=drafter.size("max_position_embeddings") or 2048,
        norms=NormSwitches(**drafter.switches),
        own_embedding="embed_tokens.weight" in tensors,
        mla=mla,
    )


def _split_fused(config: DrafterConfig, tensors: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """q/k/v and gate/up as separate matrices (row blocks of the fused ones, in that order)."""
    out = dict(tensors)
    attn, mlp = "layers.0.self_attn.", "layers.0.mlp."
    rows = [config.num_attention_heads * config.head_dim] + [config.num_key_value_heads * config.head_dim] * 2
    for kind in ("weight", "bias"):
        fused = out.pop(f"{attn}qkv_proj.{kind}", None)
        if fused is not None:
            if fused.shape[0] != sum(rows):
                raise UserError(
                    f"qkv_proj.{kind} has {fused.shape[0]} rows, heads make {sum(rows)}", "", "mend config.json"
                )
            parts = torch.split(fused, rows)
            out |= {f"{attn}{p}_proj.{kind}": t.clone() for p, t in zip("qkv", parts, strict=True)}
            notes.append(f"split the fused qkv_proj.{kind}")
    fused = out.pop(f"{mlp}gate_up_proj.weight", None)
    if fused is not None:
        gate, up = torch.chunk(fused, 2)
        out |= {f"{mlp}gate_proj.weight": gate.clone(), f"{mlp}up_proj.weight": up.clone()}
        notes.append("split the fused gate_up_proj.weight")
    return out


def _mend_map(config: DrafterConfig, tensors: dict[str, Tensor], notes: list[str], source: str) -> None:
    """d2t to int64 offsets, t2d made from it; both from nothing only where the vocabularies are equal."""
    require_sane_map(config, tensors, source)
    D, V = config.draft_vocab_size, config.vocab_size
    t2d = tensors.get("t2d")
    if t2d is not None and t2d.dtype != torch.bool:
        notes.append(f"t2d was {t2d.dtype}, now bool")
        tensors["t2d"] = t2d = t2d != 0
    d2t = tensors.get("d2t")
    if d2t is None:
        if t2d is not None and int(t2d.sum()) == D:
            tensors["d2t"] = torch.nonzero(t2d).flatten() - torch.arange(D)
            notes.append("d2t was missing: made from t2d")
        elif D == V:
            tensors |= {"d2t": torch.zeros(D, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
            notes.append("no map: draft and target vocabulary are equal")
            return
        else:
            raise UserError(
                f"{source} has no d2t, and {D} draft tokens of {V}",
                "engines take the first ids instead, without a word, and accept nothing",
                "find the map of the training run (eagle_meta.pt, d2t.npy) and add it",
            )
    elif d2t.dtype != torch.int64:
        if not torch.equal(d2t.to(torch.int64).to(d2t.dtype), d2t):
            raise UserError(f"{source}: d2t is {d2t.dtype} with values that are no integers", "", "re-make the map")
        notes.append(f"d2t was {d2t.dtype}, now int64")
        tensors["d2t"] = d2t.to(torch.int64)
    d2t = tensors["d2t"]
    ids = torch.arange(d2t.numel()) + d2t
    rising = bool((d2t[1:] > d2t[:-1]).all()) if d2t.numel() > 1 else False
    # As offsets they must give strictly rising ids inside the vocab; absolute ids read so leave it or differ from t2d.
    as_ids_fits = rising and int(d2t.min()) >= 0 and int(d2t.max()) < V
    wrong = int(ids.max()) >= V or (t2d is not None and not torch.equal(torch.nonzero(t2d).flatten(), ids))
    if as_ids_fits and wrong and (t2d is None or torch.equal(torch.nonzero(t2d).flatten(), d2t)):
        notes.append("d2t held absolute token ids, now offsets (target id = i + d2t[i])")
        tensors["d2t"] = d2t - torch.arange(d2t.numel())
        ids = d2t
    if t2d is None and int(ids.min()) >= 0 and int(ids.max()) < V:
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
        notes.append("t2d was missing: made from d2t")
