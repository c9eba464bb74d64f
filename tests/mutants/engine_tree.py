"""A little vLLM source tree of our own, to be read and never run: the places that the reader looks at, in the shapes
that releases have them. `write_engine(folder, release)` makes one of four:

    "modern-v1"   0.32-like CPU build: no model-type list, V1 runner, nested ids read
    "modern-v2"   0.32-like CUDA build: V2 runner, nested ids ignored
    "middle"      0.24-like CPU build: no list; DeepSeek's loop captures before each layer; positions not raised
    "old"         0.16-like: a model-type list, top-level ids only, no fc_norm, positions not raised, three aux states
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

TARGETS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen3MoeForCausalLM": ("llama", "LlamaForCausalLM"),
    "GptOssForCausalLM": ("llama", "LlamaForCausalLM"),
    "Phi3ForCausalLM": ("llama", "LlamaForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "KimiK25ForConditionalGeneration": ("deepseek_v2", "KimiK25ForConditionalGeneration"),
    "Qwen2_5_VLForConditionalGeneration": ("llama", "LlamaForCausalLM"),
    "Llama4ForConditionalGeneration": ("llama", "LlamaForCausalLM"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3ForCausalLM"),
    "Glm4MoeForCausalLM": ("gemma3", "Gemma3ForCausalLM"),
}
DRAFTERS = {
    "LlamaForCausalLMEagle3": ("llama_eagle3", "Eagle3LlamaForCausalLM"),
    "Eagle3LlamaForCausalLM": ("llama_eagle3", "Eagle3LlamaForCausalLM"),
    "Eagle3Qwen2_5vlForCausalLM": ("llama_eagle3", "Eagle3LlamaForCausalLM"),
}
NEW_DRAFTERS = {
    "Eagle3Qwen3ForCausalLM": ("qwen3_eagle3", "Eagle3Qwen3ForCausalLM"),
    "Eagle3DeepseekV2ForCausalLM": ("deepseek_eagle3", "Eagle3DeepseekV2ForCausalLM"),
    "Eagle3DeepseekV3ForCausalLM": ("deepseek_eagle3", "Eagle3DeepseekV2ForCausalLM"),
}

INTERFACES = """
    from typing import Protocol, runtime_checkable

    class EagleModelMixin:
        def _maybe_add_hidden_state(self, states, layer_idx, hidden):
            # a class calls this with idx + 1, after layer idx
            if layer_idx in self.aux_hidden_state_layers:
                states.append(hidden)
            return states

    @runtime_checkable
    class SupportsEagle3(Protocol):
        supports_eagle3 = True

        def set_aux_hidden_state_layers(self, layers):
            self.model.aux_hidden_state_layers = tuple(sorted(set(layers)))

        def get_eagle3_default_aux_hidden_state_layers(self):
            num_layers = len(self.model.layers)
            return (2, num_layers // 2, num_layers - 3)

    class SupportsPP(Protocol):
        supports_pp = True
"""

LLAMA = """
    from .interfaces import EagleModelMixin, SupportsEagle3, SupportsPP

    class LlamaModel(EagleModelMixin):
        supports_aux_hidden_states_over_pp = True

        def forward(self, x):
            states = []
            for idx, layer in enumerate(self.layers):
                x = layer(x)
                self._maybe_add_hidden_state(states, idx + 1, x)  # aux_hidden_state_layers
            return x

    class LlamaForCausalLM(SupportsPP, SupportsEagle3):
        pass
"""
DEEPSEEK_OLD_LOOP = """
    from .interfaces import SupportsEagle3

    class DeepseekV2Model:
        def forward(self, x):
            aux_hidden_states = []
            for idx, layer in enumerate(self.layers):
                if idx in self.aux_hidden_state_layers:
                    aux_hidden_states.append(x)
                x = layer(x)
            return x

    class DeepseekV3ForCausalLM(SupportsEagle3):
        pass

    class KimiK25ForConditionalGeneration(SupportsEagle3):
        pass
"""
DEEPSEEK = DEEPSEEK_OLD_LOOP.replace(
    "if idx in self.aux_hidden_state_layers:\n                    aux_hidden_states.append(x)\n                x = layer(x)",
    "x = layer(x)\n                self._maybe_add_hidden_state(aux_hidden_states, idx + 1, x)",
)
DEEPSEEK_NONE = DEEPSEEK_OLD_LOOP.replace("(SupportsEagle3)", "")

DRAFTER = """
    class Model:
        def __init__(self, spec):
            self.config = spec.draft_model_config.hf_config
            eagle_config = getattr(self.config, "eagle_config", None) or {{}}
            self.use_aux = eagle_config.get("use_aux_hidden_state", True)
            wide = getattr(self.config, "target_hidden_size", self.config.hidden_size)
            bias = getattr(self.config, "attention_bias", False)
            before = getattr(self.config, "norm_before_residual", False)
            {more}

    class {cls}:
        def __init__(self, spec):
            self.config = spec.draft_model_config.hf_config
            self.vocab = getattr(self.config, "draft_vocab_size", None)
"""
MORE_31 = """
            self.norm_output = getattr(self.config, "norm_output", False)
            self.fc_norm = getattr(self.config, "fc_norm", False)
            n = getattr(self.config, "num_aux_hidden_states", None)
            if n is None:
                n = len(eagle_config.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0))
"""
MORE_LLAMA = (
    """self.norm_before_fc = eagle_config.get(
                "norm_before_fc", getattr(self.config, "norm_before_fc", False)
            )"""
    + MORE_31
)
MLA_MAPPING = """

    class WeightsMapper:
        stacked = {
            ".q_a_proj": (".fused_qkv_a_proj", 0),
            ".kv_a_proj_with_mqa": (".fused_qkv_a_proj", 1),
        }
"""
MORE_QWEN = MORE_LLAMA + (
    '            n = getattr(self.config, "num_aux_layers", None) or getattr(\n'
    '                self.config, "eagle_aux_hidden_state_layer_ids", None)\n'
)

V1_RUNNER = """
    class GPUModelRunner:
        def _get_eagle3_aux_layers_from_config(self):
            hf_config = self.speculative_config.draft_model_config.hf_config
            layer_ids = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
            {nested}
            return tuple(layer_ids) if layer_ids else None

        def load(self):
            if not supports_eagle3(self.model):
                raise RuntimeError(
                    "Model does not support EAGLE3 interface but "
                    "aux_hidden_state_outputs was requested"
                )
            self.model.set_aux_hidden_state_layers(self._get_eagle3_aux_layers_from_config())
"""
V1_NESTED = """if not layer_ids:
                eagle_config = getattr(hf_config, "eagle_config", None)
                if eagle_config:
                    layer_ids = eagle_config.get("eagle_aux_hidden_state_layer_ids")"""
V2_IDS = """
    def get_eagle3_aux_layers_from_config(spec_config):
        hf_config = spec_config.draft_model_config.hf_config
        layer_ids = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
        if not layer_ids:
            target_layer_ids = getattr(hf_config, "target_layer_ids", None)
            if target_layer_ids:
                layer_ids = [i + 1 for i in target_layer_ids]
        if not layer_ids:
            for config_name in ("dflash_config", "eagle_config"):
                drafter_config = getattr(hf_config, config_name, None)
                if drafter_config:
                    layer_ids = drafter_config.get("layer_ids")
        return tuple(layer_ids) if layer_ids else None
"""
VLLM_CONFIG = """
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    class VllmConfig:
        @property
        def use_v2_model_runner(self) -> bool:
            use_v2_model_runner = envs.VLLM_USE_V2_MODEL_RUNNER
            if use_v2_model_runner is not None:
                return use_v2_model_runner
            if not HAS_TRITON:
                return False
            return True
"""
SPECULATIVE = """
    class SpeculativeConfig:
        method = None
        {positions}
        @staticmethod
        def hf_config_override(hf_config):
            initial_architecture = hf_config.architectures[0]
            if hf_config.model_type in ("deepseek_v3", "deepseek_v32"):
                hf_config.model_type = "deepseek_mtp"
            if hf_config.model_type == "deepseek_mtp":
                n_predict = getattr(hf_config, "num_nextn_predict_layers", None)
                hf_config.update({{"n_predict": n_predict, "architectures": ["DeepSeekMTPModel"]}})
            if (arch := hf_config.architectures[0]) in ("MiMoForCausalLM", "MiMoV2ForCausalLM"):
                heads = {{"MiMoForCausalLM": "MiMoMTPModel", "MiMoV2ForCausalLM": "MiMoV2MTPModel"}}
                hf_config.update({{"architectures": [heads[arch]]}})
            if hf_config.model_type in {{"qwen3_next", "qwen3_5", "qwen3_5_moe"}}:
                is_moe = hf_config.model_type == "qwen3_5_moe"
                hf_config.model_type = "qwen3_next_mtp"
                overrides = {{"n_predict": 1}}
                overrides["architectures"] = ["Qwen3_5MoeMTP" if is_moe else "Qwen3NextMTP"]
                hf_config.update(overrides)
            if initial_architecture == "MistralLarge3ForCausalLM":
                hf_config.update({{"architectures": ["EagleMistralLarge3ForCausalLM"]}})
            return hf_config

        def _verify_args(self):
            {gate}
            return self
"""
POSITIONS = """@staticmethod
        def _maybe_override_draft_max_position_embeddings(hf_config, length):
            hf_config.max_position_embeddings = max(hf_config.max_position_embeddings, length)
"""
GATE = """allowed = ["llama", "qwen", "minicpm", "gpt_oss"]
            if self.method == "eagle3" and not any(
                word in self.target_model_config.hf_text_config.model_type for word in allowed
            ):
                raise ValueError(
                    f"Eagle3 is only supported for {allowed} models. "
                    f"Got {self.target_model_config.hf_text_config.model_type=}"
                )"""
SPECULATORS = """
    def update_eagle3(config_dict: dict, pre_trained_config: dict) -> None:
        pre_trained_config["draft_vocab_size"] = config_dict.get("draft_vocab_size")
        if config_dict.get("target_hidden_size") is not None:
            pre_trained_config["target_hidden_size"] = config_dict["target_hidden_size"]
        pre_trained_config["norm_before_residual"] = config_dict.get("norm_before_residual", True)
        {more}
        arch_map = {arch}
        pre_trained_config["architectures"] = [arch_map[pre_trained_config.get("model_type", "llama")]]
        if config_dict.get("eagle_aux_hidden_state_layer_ids"):
            pre_trained_config["eagle_aux_hidden_state_layer_ids"] = config_dict["eagle_aux_hidden_state_layer_ids"]
"""
SPECULATORS_MORE = "\n        ".join(
    f'pre_trained_config["{k}"] = config_dict.get("{k}", False)' for k in ("norm_before_fc", "fc_norm", "norm_output")
)
MLA = """
    class Convertor:
        def is_deepseek_mla(self) -> bool:
            if self.hf_text_config.model_type in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
                return self.hf_text_config.kv_lora_rank is not None
            elif self.hf_text_config.model_type == "eagle":
                return self.hf_text_config.model.model_type in ("axk1", "deepseek_v2", "deepseek_v3", "deepseek_mtp")
            return False
"""
PROPOSER = """
    class Proposer:
        def load_model(self, target_model):
            if self.name(target_model) in ["Qwen2_5_VLForConditionalGeneration"]:
                self.model.config.image_token_index = target_model.config.image_token_id
            elif self.name(target_model) == "KimiK25ForConditionalGeneration":
                self.model.config.image_token_index = target_model.config.media_placeholder_token_id
            else:
                self.model.config.image_token_index = target_model.config.image_token_index
"""


CPU_MLA = """
    class CPUMLABackend:
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec=None):
            return [16]
"""
CONFIG_NAMES = """
    CONFIG_MAPPING_NAMES = OrderedDict([
        ("llama", "LlamaConfig"),
        ("qwen2", "Qwen2Config"),
        ("qwen3", "Qwen3Config"),
        ("qwen3_next", "Qwen3NextConfig"),
        ("phi3", "Phi3Config"),
        ("deepseek_v2", "DeepseekV2Config"),
        ("deepseek_v3", "DeepseekV3Config"),
    ])
"""
OWN_CONFIGS = """
    _CONFIG_REGISTRY = LazyConfigDict(
        kimi_k2="DeepseekV3Config",
    )
"""


def _table(rows: dict[str, tuple[str, str]]) -> str:
    return "{\n" + "".join(f'    "{a}": ("{m}", "{c}"),\n' for a, (m, c) in rows.items()) + "}\n"


def write_engine(folder: Path, kind: str) -> Path:
    """Write the tree and return `folder`."""
    old, middle, cpu = kind == "old", kind == "middle", kind in ("modern-v1", "middle")
    version = "0.16.0" if old else "0.24.0" if middle else "0.32.0"
    drafters = DRAFTERS if old else DRAFTERS | NEW_DRAFTERS
    models = "vllm/model_executor/models/"
    files = {
        "vllm/__init__.py": "",
        "vllm/engine/__init__.py": "",
        "vllm/version.py": f'__version__ = "{version}"\n',
        "vllm/envs.py": "VLLM_USE_V2_MODEL_RUNNER = None\n",
        "vllm/config/speculative.py": SPECULATIVE.format(
            positions="" if old or middle else POSITIONS, gate=GATE if old else "pass"
        ),
        models + "interfaces.py": INTERFACES,
        models + "registry.py": "_TEXT_GENERATION_MODELS = " + _table(TARGETS)
        + "_SPECULATIVE_DECODING_MODELS = " + _table(drafters)
        + "_VLLM_MODELS = {**_TEXT_GENERATION_MODELS, **_SPECULATIVE_DECODING_MODELS}\n",
        models + "llama.py": LLAMA,
        models + "deepseek_v2.py": DEEPSEEK_NONE if old else DEEPSEEK_OLD_LOOP if middle else DEEPSEEK,
        models + "gemma3.py": "class Gemma3ForCausalLM:\n    pass\n",
        models + "llama_eagle3.py": DRAFTER.format(cls="Eagle3LlamaForCausalLM", more="" if old else MORE_LLAMA),
        "vllm/v1/worker/gpu_model_runner.py": V1_RUNNER.format(nested="" if old else V1_NESTED),
        "vllm/transformers_utils/configs/speculators/algos.py": SPECULATORS.format(
            more="" if old else SPECULATORS_MORE,
            arch='{"llama": "Eagle3LlamaForCausalLM"}' if old
            else '{"qwen3": "Eagle3Qwen3ForCausalLM", "llama": "Eagle3LlamaForCausalLM"}',
        ),
        "vllm/transformers_utils/model_arch_config_convertor.py": MLA,
        "vllm/v1/spec_decode/llm_base_proposer.py": PROPOSER,
        "vllm/transformers_utils/config.py": OWN_CONFIGS,
        "vllm/v1/attention/backends/mla/cpu_mla.py": CPU_MLA,
        "vllm/v1/attention/backends/cpu_attn.py": CPU_MLA.replace("MLA", "Attention").replace("[16]", "[MultipleOf(32)]"),
        "transformers/models/auto/configuration_auto.py": CONFIG_NAMES,
        f"vllm{'_cpu' if cpu else ''}-{version}.dist-info/METADATA":
            f"Metadata-Version: 2.1\nName: vllm{'-cpu' if cpu else ''}\nVersion: {version}\n\n",
    }  # fmt: skip
    if not old:
        files |= {
            "vllm/config/vllm.py": VLLM_CONFIG,
            "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py": V2_IDS,
            models + "qwen3_eagle3.py": DRAFTER.format(cls="Eagle3Qwen3ForCausalLM", more=MORE_QWEN),
            models + "deepseek_eagle3.py": DRAFTER.format(cls="Eagle3DeepseekV2ForCausalLM", more=MORE_31.lstrip())
            + MLA_MAPPING,
        }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"), encoding="utf-8")
    return folder
