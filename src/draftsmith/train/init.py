"""Where training starts: the drafter's shape taken from the target, and its first weights.

`init: target` puts in what the target already knows: lm_head rows (times the target's final norm, scaled so that the
logits of an average state have unit spread). `init: layer` also copies the target's last decoder layer where the shapes
allow; `init: random` is the plain start. What a layer gains at equal steps: benchmarks/train_variants.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.contract import Contract, NormSwitches
from draftsmith.drafter.config import DrafterConfig, MlaSizes
from draftsmith.drafter.model import Drafter
from draftsmith.errors import UserError
from draftsmith.recipe import DrafterSection
from draftsmith.record import sha256_bytes
from draftsmith.target.config import LAYERS, load_config, size_of, text_config
from draftsmith.target.weights import head_rule, layer_weights, read_final_norm, read_lm_head
from draftsmith.train.objective import TargetHead

MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


def rope_of(text: dict[str, Any]) -> dict[str, Any]:
    """The target's rope in transformers' one spelling; of several (sliding and full attention) the full one."""
    rope = text.get("rope_parameters") or {}
    if "full_attention" in rope:
        rope = rope["full_attention"]
    rope = {k: v for k, v in rope.items() if v is not None}
    old = {k: v for k, v in (text.get("rope_scaling") or {}).items() if v is not None}
    rope = {**old, **rope}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
        rope.pop("type", None)
    rope.setdefault("rope_theta", float(text.get("rope_theta") or 10000.0))
    rope.setdefault("rope_type", "default")
    if rope["rope_type"] in ("yarn", "llama3") and "original_max_position_embeddings" not in rope:
        rope["original_max_position_embeddings"] = text.get("original_max_position_embeddings") or text.get(
            "max_position_embeddings"
        )
    return rope


def drafter_config(section: DrafterSection, cfg: dict[str, Any], contract: Contract) -> DrafterConfig:
    """The drafter's shape: what the recipe gives, else the target's. cfg: the target's parsed config.json; contract:
    with aux layers and draft vocab size decided. UserError where the target's config does not give a size."""
    text, name = text_config(cfg), contract.target.name
    G, V = contract.target.hidden_size, contract.target.vocab_size
    H = section.hidden_size or G
    n = section.num_attention_heads or size_of(text, ("num_attention_heads", "n_head"), name)
    m = section.num_key_value_heads or int(text.get("num_key_value_heads") or n)
    # MLA targets state no head_dim: their value width is the natural one for a plain drafter
    d = section.head_dim or int(text.get("head_dim") or text.get("v_head_dim") or H // n)
    mla = None
    if section.form == "mla":
        missing = [k for k in MLA_KEYS[1:] if not text.get(k)]
        if missing:
            raise UserError(
                f"drafter.form is 'mla', but the target's config has no {', '.join(missing)}",
                "the latent sizes of the drafter are taken from an MLA target",
                "use form 'llama' (any target can have such a drafter)",
            )
        if not text.get("q_lora_rank"):
            raise UserError(
                "drafter.form is 'mla', but the target has no q_lora_rank",
                "the engine's MLA drafter cannot load direct queries (deepseek_eagle3.py renames kv_a_proj_with_mqa)",
                "use form 'llama' (any target can have such a drafter)",
            )
        if section.norm_before_fc:
            raise UserError(
                "drafter.norm_before_fc with form 'mla'",
                "the engine's MLA drafter has no input norm: it would leave it out",
                "use fc_norm, which both forms have",
            )
        mla = MlaSizes.model_validate({k: text.get(k) for k in MLA_KEYS})
    if contract.aux_layer_ids is None or contract.draft_vocab_size is None:
        raise ValueError("aux layers and draft vocab must be decided before the drafter's shape")
    return DrafterConfig(
        form=section.form,
        hidden_size=H,
        target_hidden_size=G,
        num_aux_layers=len(contract.aux_layer_ids),
        aux_layer_ids=contract.aux_layer_ids,
        vocab_size=V,
        draft_vocab_size=contract.draft_vocab_size,
        num_attention_heads=n,
        num_key_value_heads=m if n % m == 0 else n,
        head_dim=d,
        intermediate_size=section.intermediate_size or size_of(text, ("intermediate_size", "n_inner"), name),
        rms_norm_eps=head_rule(cfg).eps,
        rope=section.rope or rope_of(text),
        max_position_embeddings=int(text.get("max_position_embeddings") or 2048),
        norms=NormSwitches(
            norm_before_residual=section.norm_before_residual,
            norm_before_fc=section.norm_before_fc,
            fc_norm=section.fc_norm,
            norm_output=section.norm_output,
        ),
        own_embedding=H != G,
        mla=mla,
    )


def target_head(folder: Path, draft_to_target: Sequence[int]) -> TargetHead:
    """The teacher's head from the target's folder: final norm and the lm_head rows of the draft vocab, float32."""
    cfg = load_config(folder)
    rule = head_rule(cfg)
    rows = read_lm_head(folder, rows=draft_to_target).float()
    return TargetHead(read_final_norm(folder).float(), rule.eps, rows, None, rule.scale, rule.softcap)


def random_start(model: Drafter, seed: int) -> None:
    """Weights of a variance that keeps unit-RMS inputs at unit RMS; what adds to the residual starts at half that;
    lm_head at 0.02. Each tensor has its own seeded stream: a new one elsewhere changes no other."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            gen = torch.Generator().manual_seed(int(sha256_bytes(f"init:{seed}:{name}".encode())[:15], 16))
            std = 0.02 if name in ("lm_head.weight", "embed_tokens.weight") else 1 / math.sqrt(p.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= 0.5
            p.copy_(torch.randn(p.shape, generator=gen) * std)


def start_head(model: Drafter, head: TargetHead) -> bool:
    """lm_head from the target's rows times its final norm, scaled to unit logit spread. False if the widths differ."""
    weight = head.rows * head.norm_weight
    if weight.shape != model.lm_head.weight.shape:
        return False
    with torch.no_grad():
        model.lm_head.weight.copy_(weight / weight.square().sum(1).mean().sqrt())
    return True


def start_layer(model: Drafter, layer: dict[str, Tensor]) -> list[str]:
    """Copy from a decoder layer of the target what has the drafter's shapes; returns the names taken.

    q/k/v: the target's read one stream, the drafter's read [embedding; state]: the state's half takes the target's."""
    taken = []
    own = dict(model.layers[0].named_parameters())
    with torch.no_grad():
        for name in (*MLP, "post_attention_layernorm.weight", "self_attn.o_proj.weight"):
            if name in layer and name in own and layer[name].shape == own[name].shape:
                own[name].copy_(layer[name])
                taken.append(name)
        H = model.config.hidden_size
        for part in ("q", "k", "v"):
            name = f"self_attn.{part}_proj.weight"
            if name in layer and name in own and layer[name].shape == (own[name].shape[0], H):
                own[name][:, H:].copy_(layer[name])
                taken.append(name)
        if "input_layernorm.weight" in layer and layer["input_layernorm.weight"].shape == (H,):
            own["hidden_norm.weight"].copy_(layer["input_layernorm.weight"])
            taken.append("hidden_norm.weight")
    return taken


def first_weights(
    model: Drafter, folder: Path, head: TargetHead, kind: str, seed: int, embedding: Tensor | None = None
) -> list[str]:
    """Fill the drafter's weights; returns in words what came from the target.

    kind: "target", "layer" (the target's last decoder layer as well) or "random". embedding: the target's table, for a
    drafter that has its own of the same width."""
    random_start(model, seed)
    notes: list[str] = []
    if kind == "random":
        return notes
    if start_head(model, head):
        notes.append("lm_head")
    if model.embed_tokens is not None and embedding is not None and embedding.shape == model.embed_tokens.weight.shape:
        with torch.no_grad():
            model.embed_tokens.weight.copy_(embedding)
        notes.append("embed_tokens")
    if kind == "layer":
        last = size_of(text_config(load_config(folder)), LAYERS, str(folder)) - 1
        taken = start_layer(model, {n: t.float() for n, t in layer_weights(folder, last).items()})
        notes += [f"layer {last}: {name}" for name in taken]
    return notes


__all__ = ["drafter_config", "first_weights", "layer_weights", "start_layer", "target_head"]
