"""A drafter as an engine will see it: its config after the engine's own rewriting, its tensors under one spelling,
and the tensors that a graph with these switches needs.

Shape letters: H drafter hidden, G target hidden, A aux layers, V target vocab, D draft vocab, I MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from draftsmith.check import values as v
from draftsmith.check.dialect import Dialect, detect
from draftsmith.check.headers import Weights
from draftsmith.check.types import TensorHeader

PREFIXES = ("_orig_mod.", "module.", "draft_model.", "model.")
"""Wrappers' prefixes that stray into checkpoints; no engine strips them."""

SPECULATORS_ARCHITECTURES = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
"""transformer_layer_config.model_type → class (vllm/transformers_utils/configs/speculators/algos.py)."""

LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
OWN_TENSORS = ("fc", "norm", "input_norm", "fc_norm", "lm_head", "embed_tokens", "layers", "d2t", "t2d", "mask_hidden")
"""First name parts that an EAGLE-3 class knows (vllm/model_executor/models/llama_eagle3.py: load_weights)."""


def canonical(name: str) -> tuple[str, str]:
    """(name as the engine's mapper makes it, stray prefix that it carried)."""
    stray = ""
    changed = True
    while changed:
        changed = False
        for prefix in PREFIXES:
            if name.startswith(prefix):
                name, stray, changed = name[len(prefix) :], stray + prefix, True
    return name.replace("midlayer.", "layers.0."), stray


@dataclass(frozen=True)
class Drafter:
    """raw: config.json as it lies there. config: flat, as a transformers config of this drafter would hold it."""

    folder: Path
    typed: str
    raw: dict[str, Any]
    weights: Weights

    @cached_property
    def dialect(self) -> Dialect:
        return detect(self.raw, self.weights.tensors)

    @property
    def readable(self) -> bool:
        """Whether the tensors are known (safetensors, all headers sound)."""
        return bool(self.weights.tensors) and not self.weights.problems

    @property
    def speculators(self) -> bool:
        return self.dialect.name == "speculators" or (
            self.dialect.name == "p-eagle" and "transformer_layer_config" in self.raw
        )

    @cached_property
    def config(self) -> dict[str, Any]:
        """A speculators config flattened as vLLM does it; any other config as it is."""
        if not self.speculators:
            return self.raw
        layer = dict(v.mapping(self.raw, "transformer_layer_config"))
        for key in ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"):
            if self.raw.get(key) is not None:
                layer[key] = self.raw[key]
        for key in v.SWITCHES:
            if key in self.raw:
                layer[key] = self.raw[key]
        layer["architectures"] = [SPECULATORS_ARCHITECTURES.get(self.model_type_of(layer), "")]
        return layer

    @staticmethod
    def model_type_of(config: v.Config) -> str:
        return v.text(config, "model_type") or "llama"

    @property
    def model_type(self) -> str:
        return self.model_type_of(self.config)

    @cached_property
    def declared(self) -> str | None:
        """The architecture that the config names."""
        a = self.config.get("architectures")
        return a[0] if isinstance(a, list) and a and isinstance(a[0], str) and a[0] else None

    @cached_property
    def architecture(self) -> str:
        """The name that method eagle3 looks up (vllm/transformers_utils/configs/eagle.py: EAGLEConfig)."""
        name = self.declared or {"llama": "LlamaModel"}.get(self.model_type, "Model")
        return name if name.startswith(("Eagle3", "Peagle", "PEagle")) or name.endswith("Eagle3") else f"Eagle3{name}"

    @cached_property
    def form(self) -> Literal["llama", "qwen3", "mla"]:
        if "Deepseek" in self.architecture or "DeepSeek" in self.architecture:
            return "mla"
        return "qwen3" if self.architecture in ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM") else "llama"

    @cached_property
    def tensors(self) -> dict[str, TensorHeader]:
        """Canonical name → tensor."""
        return {canonical(n)[0]: t for n, t in self.weights.tensors.items()}

    @cached_property
    def twice(self) -> list[tuple[str, str]]:
        """Pairs of names that become one in the engine."""
        seen: dict[str, str] = {}
        out = []
        for name in self.weights.tensors:
            one = canonical(name)[0]
            if one in seen:
                out.append((seen[one], name))
            seen.setdefault(one, name)
        return out

    @cached_property
    def stray_prefixes(self) -> dict[str, str]:
        """Stray prefix → one name that carries it."""
        return {p: n for n in self.weights.tensors if (p := canonical(n)[1])}

    def size(self, key: str) -> int | None:
        return v.size(self.config, key, self.model_type)

    @cached_property
    def switches(self) -> dict[str, bool]:
        """The norm switches as written; a nested `eagle_config.norm_before_fc` counts as written."""
        out = {k: bool(self.config.get(k)) for k in v.SWITCHES}
        nested = v.mapping(self.config, "eagle_config")
        if "norm_before_fc" in nested:
            out["norm_before_fc"] = bool(nested["norm_before_fc"])
        return out

    @cached_property
    def top_ids(self) -> list[int] | None:
        return v.ids(self.config.get("eagle_aux_hidden_state_layer_ids"))

    @cached_property
    def nested_ids(self) -> list[int] | None:
        return v.ids(v.mapping(self.config, "eagle_config").get("eagle_aux_hidden_state_layer_ids"))

    @cached_property
    def heads(self) -> tuple[int, int, int] | None:
        """(query heads, key/value heads, head size) as the engine computes them; None where the config is broken."""
        hidden, n = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden is None or n is None:
            return None
        kv = self.size("num_key_value_heads") or n
        return n, kv, self.size("head_dim") or hidden // n

    @cached_property
    def draft_vocab(self) -> int | None:
        """D: draft_vocab_size, absent or null = vocab_size."""
        return self.size("draft_vocab_size") or self.size("vocab_size")

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        t = self.tensors.get(name)
        return None if t is None else t.shape

    @cached_property
    def required(self) -> dict[str, tuple[int | None, ...]]:
        """Every tensor without which a part of the graph stays uninitialised, with its shape (None = any size).
        fc, lm_head and the map have checks of their own."""
        h, i = self.size("hidden_size"), self.size("intermediate_size")
        out: dict[str, tuple[int | None, ...]] = {"fc.weight": (h, None), "norm.weight": (h,)}
        if self.use_aux is False:
            del out["fc.weight"]
        for k in range(min(self.size("num_hidden_layers") or 1, 256)):
            p, wide = f"layers.{k}.", 2 * h if h and k == 0 else h
            for n in LAYER_NORMS if k == 0 else ("input_layernorm", "post_attention_layernorm"):
                out[f"{p}{n}.weight"] = (h,)
            out |= self._mla(p, wide, h) if self.form == "mla" else self._attention(p, wide, h)
            out[p + "mlp.gate_proj.weight"] = out[p + "mlp.up_proj.weight"] = (i, h)
            out[p + "mlp.down_proj.weight"] = (h, i)
            if self.form == "llama" and self.config.get("mlp_bias") is True:  # models/llama.py: LlamaMLP alone reads it
                out[p + "mlp.gate_proj.bias"] = out[p + "mlp.up_proj.bias"] = (i,)
                out[p + "mlp.down_proj.bias"] = (h,)
        return out

    @property
    def use_aux(self) -> bool:
        value = v.mapping(self.config, "eagle_config").get("use_aux_hidden_state", True)
        return bool(value)

    def _attention(self, p: str, wide: int | None, h: int | None) -> dict[str, tuple[int | None, ...]]:
        n, kv, d = self.heads or (None, None, None)
        q = n * d if n and d else None
        k = kv * d if kv and d else None
        out: dict[str, tuple[int | None, ...]] = {
            p + "self_attn.q_proj.weight": (q, wide),
            p + "self_attn.k_proj.weight": (k, wide),
            p + "self_attn.v_proj.weight": (k, wide),
            p + "self_attn.o_proj.weight": (h, q),
        }
        if self.form == "qwen3":
            out[p + "self_attn.q_norm.weight"] = out[p + "self_attn.k_norm.weight"] = (d,)
        if self.config.get("attention_bias") is True:
            out[p + "self_attn.q_proj.bias"] = (q,)
            out[p + "self_attn.k_proj.bias"] = out[p + "self_attn.v_proj.bias"] = (k,)
            # vLLM gives Llama's o_proj one as well (models/llama.py: bias_o_proj = attention_bias; qwen3.py does not);
            # absent, it is never filled.
            if self.form == "llama":
                out[p + "self_attn.o_proj.bias"] = (h,)
        return out

    def _mla(self, p: str, wide: int | None, h: int | None) -> dict[str, tuple[int | None, ...]]:
        n, kv = self.size("num_attention_heads"), self.size("kv_lora_rank")
        nope, rope, vd = self.size("qk_nope_head_dim"), self.size("qk_rope_head_dim"), self.size("v_head_dim")
        qk = n * (nope + rope) if n and nope and rope else None
        out: dict[str, tuple[int | None, ...]] = {
            p + "self_attn.kv_a_proj_with_mqa.weight": (kv + rope if kv and rope else None, wide),
            p + "self_attn.kv_a_layernorm.weight": (kv,),
            p + "self_attn.kv_b_proj.weight": (n * (nope + vd) if n and nope and vd else None, kv),
            p + "self_attn.o_proj.weight": (h, n * vd if n and vd else None),
        }
        if self.config.get("q_lora_rank", 1) is None:
            return out | {p + "self_attn.q_proj.weight": (qk, wide)}
        q = self.size("q_lora_rank")
        return out | {
            p + "self_attn.q_a_proj.weight": (q, wide),
            p + "self_attn.q_a_layernorm.weight": (q,),
            p + "self_attn.q_b_proj.weight": (qk, q),
        }
