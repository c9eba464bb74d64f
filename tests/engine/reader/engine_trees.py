"""Small made-up engine sources in the shapes that real releases have had; written in our own words, a few lines each."""

from __future__ import annotations

import zipfile
from pathlib import Path

INTERFACES = """
from typing import ClassVar, Literal, Protocol, runtime_checkable

@runtime_checkable
class SupportsEagleBase(Protocol):
    has_own_lm_head: bool = False

@runtime_checkable
class SupportsEagle3(SupportsEagleBase, Protocol):
    supports_eagle3: ClassVar[Literal[True]] = True

    def set_aux_hidden_state_layers(self, layers):
        self.model.aux = layers

    def get_eagle3_default_aux_hidden_state_layers(self):
        num_layers = len(self.model.layers)
        return (2, num_layers // 2, num_layers - 3)

class IsHybrid(Protocol):
    pass
"""

RUNNER_V1 = '''
class GPUModelRunner:
    def setup(self):
        if not supports_eagle3(self.get_model()):
            raise RuntimeError(
                "Model does not support EAGLE3 interface but "
                "aux_hidden_state_outputs was requested")

    def _get_eagle3_aux_layers_from_config(
        self,
    ):
        """Look for ids.

        In two places."""
        hf_config = self.speculative_config.draft_model_config.hf_config
        layer_ids = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
        if not layer_ids:
            eagle_config = getattr(hf_config, "eagle_config", None)
            if eagle_config and isinstance(eagle_config, dict):
                layer_ids = eagle_config.get("eagle_aux_hidden_state_layer_ids")
        return layer_ids

    def after(self):
        return self.config.not_for_ids
'''

RUNNER_V2 = """
def get_eagle3_aux_layers_from_config(spec_config):
    hf_config = spec_config.draft_model_config.hf_config
    layer_ids = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
    for config_name in ("dflash_config", "eagle_config"):
        part = getattr(hf_config, config_name, None)
        if part:
            layer_ids = part.get("layer_ids")
    return layer_ids
"""

REGISTRY = """
_TEXT_GENERATION_MODELS = {
    "PlainForCausalLM": ("plain", "PlainForCausalLM"),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "HeirForCausalLM": ("heir", "HeirForCausalLM"),
    # "GhostForCausalLM": ("ghost", "GhostForCausalLM"),
    "SplitForCausalLM": ("vllm.models.split", "SplitForCausalLM"),
    "LazyForCausalLM": (
        "vllm.models.lazy",
        "LazyForCausalLM",
    ),
    "DuckForCausalLM": ("duck", "DuckForCausalLM"),
    "HalfDuckForCausalLM": ("duck", "HalfDuckForCausalLM"),
    "MadeModel": ("made", "MadeModel"),
    "LostForCausalLM": ("lost", "LostForCausalLM"),
    "GoneForCausalLM": ("nowhere", "GoneForCausalLM"),
    "VersionedForCausalLM": ("versioned", "VersionedForCausalLM"),
    "TwiceForCausalLM": ("plain", "PlainForCausalLM"),
}
_SPECULATIVE_DECODING_MODELS = {
    "LlamaForCausalLMEagle3": ("llama_eagle3", "Eagle3LlamaForCausalLM"),
    "Eagle3LlamaForCausalLM": ("llama_eagle3", "Eagle3LlamaForCausalLM"),
    "MedusaModel": ("medusa", "Medusa"),
}
_TRANSFORMERS_BACKEND_MODELS = {
    "TransformersForCausalLM": ("backend", "TransformersForCausalLM"),
    "TransformersMoEForCausalLM": ("backend", "TransformersMoEForCausalLM"),
    "TwiceForCausalLM": ("backend", "TransformersForCausalLM"),
}
_VLLM_MODELS = {**_TEXT_GENERATION_MODELS, **_SPECULATIVE_DECODING_MODELS, **_TRANSFORMERS_BACKEND_MODELS}
_PREVIOUSLY_SUPPORTED_MODELS = {"OldForCausalLM": "0.9.2"}
"""

MODELS = {
    "plain": "import torch.nn as nn\nfrom .interfaces import *\nclass PlainForCausalLM(nn.Module, IsHybrid):\n    pass\n",
    "llama": (
        "from torch import nn\nfrom .interfaces import SupportsEagle3, SupportsEagleBase\n"
        "class LlamaForCausalLM(nn.Module, SupportsEagleBase, SupportsEagle3):\n    pass\n"
    ),
    "heir": (
        "import vllm.model_executor.models.mixins as mixins\n"
        "Between = mixins.AuxMixin\n"
        "class HeirForCausalLM(Between[int]):\n"
        "    def get_eagle3_default_aux_hidden_state_layers(self):\n        return (1, 2, self.config.num_hidden_layers - 1)\n"
    ),
    "mixins": "from .interfaces import SupportsEagle3 as _Eagle\nclass AuxMixin(_Eagle):\n    pass\n",
    "duck": (
        "class _Duck:\n    supports_eagle3 = True\n    has_own_lm_head = False\n"
        "    def set_aux_hidden_state_layers(self, layers): ...\n"
        "class DuckForCausalLM(_Duck):\n    def get_eagle3_default_aux_hidden_state_layers(self): ...\n"
        "class HalfDuckForCausalLM(_Duck):\n    pass\n"
    ),
    "made": (
        "from .adapters import as_embedding_model\nfrom .llama import LlamaForCausalLM\n"
        "MadeModel = as_embedding_model(LlamaForCausalLM)\n"
    ),
    "adapters": "def as_embedding_model(cls):\n    class Made(cls):\n        pass\n    return Made\n",
    "lost": "from .somewhere_else import Base\nclass LostForCausalLM(Base):\n    pass\n",
    "versioned": (
        "from .plain import PlainForCausalLM\nfrom .llama import LlamaForCausalLM\n"
        "class Base(PlainForCausalLM):\n    pass\n"
        "class V1(Base):\n    pass\nclass V2(Base, LlamaForCausalLM):\n    pass\n"
        "_VERSIONS = {1: V1, 2: V2}\n"
        "class VersionedForCausalLM(Base):\n"
        "    def __new__(cls, *, vllm_config):\n        return _VERSIONS[vllm_config.version](vllm_config)\n"
    ),
    "backend": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    class _Base:\n        pass\n"
        "else:\n    from .llama import LlamaForCausalLM as _Base\n"
        "class TransformersForCausalLM(_Base): ...\nclass TransformersMoEForCausalLM(_Base): ...\n"
    ),
    "llama_eagle3": (
        "class Model:\n    def __init__(self, vllm_config):\n"
        "        self.config = vllm_config.speculative_config.draft_model_config.hf_config\n"
        "        eagle_config = getattr(self.config, 'eagle_config', None) or {}\n"
        "        self.before = eagle_config.get('norm_before_fc', getattr(self.config, 'norm_before_fc', False))\n"
        "        self.count = getattr(self.config, 'num_aux_hidden_states', None)\n"
        "        if 'use_aux_hidden_state' in eagle_config:\n            self.use = eagle_config['use_aux_hidden_state']\n"
        "        if hasattr(self.config, 'target_hidden_size'):\n            self.size = self.config.target_hidden_size\n"
        "        self.other = vllm_config.cache_config.block_size\n"
        "class Eagle3LlamaForCausalLM:\n    pass\n"
    ),
    "medusa": "class Medusa:\n    pass\n",
}

SPLIT = """
from typing import TYPE_CHECKING
from vllm.platforms import current_platform
if TYPE_CHECKING or current_platform.is_rocm():
    from .amd.model import SplitForCausalLM
elif current_platform.device_type == "tpu":
    pass
else:
    from .nvidia.model import SplitForCausalLM
"""

LAZY = """
__all__ = ["LazyForCausalLM"]
def __getattr__(name):
    from vllm.platforms import current_platform
    if name == "Other":
        return None
    if name in __all__:
        if current_platform.is_rocm():
            from .amd import model as amd_model
            return getattr(amd_model, name)
        from .nvidia import model as nvidia_model
        return getattr(nvidia_model, name)
    raise AttributeError(name)
"""

_WITH = "from vllm.model_executor.models.interfaces import SupportsEagle3\nclass {name}(SupportsEagle3):\n    pass\n"
_WITHOUT = "class {name}:\n    pass\n"

LIST_STRING = """
class SpeculativeConfig:
    def _verify_args(self):
        if self.method == "eagle3" and self.target_model_config and \\
            "llama" not in self.target_model_config.hf_text_config.model_type:
            raise ValueError("Eagle3 is only supported for Llama models. "
                             f"Got {self.target_model_config.hf_text_config.model_type=}")
"""

LIST_LOCAL = """
class SpeculativeConfig:
    def _verify_args(self):
        if self.method == "ngram" and "llama" not in self.model_type:
            raise ValueError("another matter")
        allowed_words = ["llama", "qwen"]
        if (self.method == "eagle3" and self.target_model_config
                and not any(word in self.target_model_config.hf_text_config.model_type for word in allowed_words)):
            raise ValueError(
                f"Eagle3 is only supported for {allowed_words} models. "
                f"Got {self.target_model_config.hf_text_config.model_type=}")
"""

LIST_METHODS = """
WORDS = frozenset(["llama", "kimi_k2"])
class SpeculativeConfig:
    def _verify_args(self):
        if (self.method in ("eagle3", "dflash")
                and not any(w in self.target_model_config.hf_config.model_type for w in WORDS)):
            raise ValueError(f"{self.method} is only supported for {WORDS} models. "
                             f"Got {self.target_model_config.hf_config.model_type=}")
"""

LIST_ELSEWHERE = """
from vllm.lists import WORDS
class SpeculativeConfig:
    def _verify_args(self):
        if self.method == "eagle3" and not any(w in self.hf_text_config.model_type for w in WORDS):
            raise ValueError("no")
"""

LIST_NONE = (
    "class SpeculativeConfig:\n    method: str | None = None  # eagle3; looks at hf_config.model_type elsewhere\n"
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def vllm_files(
    speculative: str = LIST_NONE, version: str | None = "0.30.0", interfaces: str = INTERFACES, **changes: str
) -> dict[str, str]:
    """File name → text of a small vLLM. changes: `config_vllm="…"` replaces or adds vllm/config/vllm.py, and so on."""
    models = "vllm/model_executor/models"
    files = {
        "vllm/__init__.py": "",
        "vllm/engine/__init__.py": "",
        "vllm/config/__init__.py": "",
        "vllm/config/speculative.py": speculative,
        f"{models}/__init__.py": "",
        f"{models}/registry.py": REGISTRY,
        f"{models}/interfaces.py": interfaces,
        "vllm/v1/worker/gpu_model_runner.py": RUNNER_V1,
        "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py": RUNNER_V2,
        "vllm/models/split/__init__.py": SPLIT,
        "vllm/models/split/nvidia/model.py": _WITH.format(name="SplitForCausalLM"),
        "vllm/models/split/amd/model.py": _WITHOUT.format(name="SplitForCausalLM"),
        "vllm/models/lazy/__init__.py": LAZY,
        "vllm/models/lazy/nvidia/model.py": _WITHOUT.format(name="LazyForCausalLM"),
        "vllm/models/lazy/amd/model.py": _WITH.format(name="LazyForCausalLM"),
    }
    files |= {f"{models}/{name}.py": text for name, text in MODELS.items()}
    if version:
        files["vllm/_version.py"] = f"__version__ = version = {version!r}\n"
    files |= {f"vllm/{name.replace('__', '/')}.py": text for name, text in changes.items()}
    return files


def write_vllm(root: Path, *args: str, **kwargs: str) -> Path:
    return write(root, vllm_files(*args, **kwargs))


def pack(root: Path, wheel: Path) -> Path:
    """The files below `root` as a wheel."""
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as z:
        for file in sorted(p for p in root.rglob("*") if p.is_file()):
            z.write(file, file.relative_to(root).as_posix())
    return wheel
