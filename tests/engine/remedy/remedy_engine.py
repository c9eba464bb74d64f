"""A made-up vLLM 0.16 with a list, a capable and an incapable class; and targets and drafters of a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

H, V, D = 64, 320, 128
ENGINE = {
    "vllm/__init__.py": "",
    "vllm/engine/__init__.py": "",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/models/__init__.py": "",
    "vllm/model_executor/models/interfaces.py": """
from typing import ClassVar, Literal, Protocol, runtime_checkable


@runtime_checkable
class SupportsEagle3(Protocol):
    supports_eagle3: ClassVar[Literal[True]] = True

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None: ...


def supports_eagle3(model):
    return isinstance(model, SupportsEagle3)
""",
    "vllm/model_executor/models/able.py": """
from .interfaces import SupportsEagle3


class AbleForCausalLM(SupportsEagle3):
    def set_aux_hidden_state_layers(self, layers):
        self.model.aux_hidden_state_layers = layers
""",
    "vllm/model_executor/models/unable.py": "class UnableForCausalLM:\n    pass\n",
    "vllm/model_executor/models/registry.py": """
_TEXT_GENERATION_MODELS = {
    "AbleForCausalLM": ("able", "AbleForCausalLM"),
    "LlamaForCausalLM": ("able", "AbleForCausalLM"),
    "UnableForCausalLM": ("unable", "UnableForCausalLM"),
}
_SPECULATIVE_DECODING_MODELS = {
    "LlamaForCausalLMEagle3": ("llama_eagle3", "Eagle3LlamaForCausalLM"),
}
_VLLM_MODELS = {**_TEXT_GENERATION_MODELS, **_SPECULATIVE_DECODING_MODELS}
""",
    "vllm/model_executor/models/llama_eagle3.py": """
class Eagle3LlamaForCausalLM:
    def __init__(self, config):
        self.fc_input = config.target_hidden_size * getattr(config, "num_aux_hidden_states", 3)
        self.norm = getattr(config, "norm_before_residual", False)
        self.draft_vocab_size = config.draft_vocab_size
""",
    "vllm/config/__init__.py": "",
    "vllm/config/speculative.py": """
class SpeculativeConfig:
    def _verify_args(self):
        eagle3_target_supported = [
            "llama",
            "qwen",
            "minicpm",
        ]
        if self.method == "eagle3" and self.target_model_config and not any(
            supported_model in self.target_model_config.hf_text_config.model_type
            for supported_model in eagle3_target_supported
        ):
            raise ValueError(
                f"Eagle3 is only supported for {eagle3_target_supported} models. "
                f"Got {self.target_model_config.hf_text_config.model_type=}"
            )
        return self
""",
    "vllm/v1/worker/gpu_model_runner.py": """
class GPUModelRunner:
    def load_model(self):
        if not supports_eagle3(self.get_model()):
            raise RuntimeError("Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested")

    def _get_eagle3_aux_layers_from_config(self):
        hf_config = self.speculative_config.draft_model_config.hf_config
        layer_ids = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
        return tuple(layer_ids) if layer_ids else None
""",
}


def write_engine(site: Path, version: str = "0.16.0") -> Path:
    for name, text in ENGINE.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text.lstrip("\n"))
    (site / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    return site


def write_target(folder: Path, architecture: str, model_type: str) -> Path:
    folder.mkdir(parents=True)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": H,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": V,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_drafter(folder: Path, aux: int = 3, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    shapes = {
        "fc.weight": (H, aux * H),
        "layers.0.self_attn.q_proj.weight": (64, 2 * H),
        "layers.0.self_attn.k_proj.weight": (64, 2 * H),
        "layers.0.self_attn.v_proj.weight": (64, 2 * H),
        "layers.0.self_attn.o_proj.weight": (H, 64),
        "layers.0.mlp.gate_proj.weight": (128, H),
        "layers.0.mlp.up_proj.weight": (128, H),
        "layers.0.mlp.down_proj.weight": (H, 128),
        "lm_head.weight": (D, H),
    }
    tensors = {name: rng.normal(0, 0.02, shape).astype(np.float16) for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"layers.0.{name}.weight"] = rng.normal(1, 0.1, H).astype(np.float16)
    tensors["norm.weight"] = rng.normal(1, 0.1, H).astype(np.float16)
    tensors["d2t"] = np.zeros(D, np.int64)
    tensors["t2d"] = np.arange(V) < D
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": V,
        "draft_vocab_size": D,
        "target_hidden_size": H,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    } | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return folder


def pair(place: Path, architecture: str, model_type: str, name: str = "d-eagle3", **changes: Any) -> tuple[str, str]:
    target = write_target(place / "target", architecture, model_type)
    return str(target), str(write_drafter(place / name, **changes))
