"""A package `vllm` of a few small modules with the shapes that the plugin looks for, written for these tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAULTY = """
import torch


def _ensure_int64(t):
    return t if t.dtype == torch.int64 else t.to(torch.int64)


def kernel(output, values, ends, replace_from, replace_to):
    start = 0
    for value, end in zip(values.tolist(), ends.tolist()):
        output[start:end] = replace_to if value == replace_from else value
        start = end


def _expand_kernel_impl(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    kernel(_ensure_int64(output), _ensure_int64(input_val), _ensure_int64(cu_num_tokens), replace_from, replace_to)


held_elsewhere = {"expand": _expand_kernel_impl}
"""

GATE = """
from pydantic import model_validator
from pydantic.dataclasses import dataclass
from typing import Any


@dataclass
class SpeculativeConfig:
    method: str
    target_model_config: Any = None

    @model_validator(mode="after")
    def _verify_args(self):
        allowed = [{types}]
        if self.method == "eagle3" and not any(t in self.target_model_config.hf_text_config.model_type for t in allowed):
            raise ValueError(f"{{self.method}} is only for {{allowed}}")
        return self
"""

MODELS = {
    "interfaces.py": "class SupportsEagle3:\n    pass\n",
    "base.py": "from .interfaces import SupportsEagle3 as Aux\n\n\nclass Base(object, Aux):\n    pass\n",
    "able.py": "import vllm.missing\nfrom vllm.model_executor.models.base import Base\n\n\nclass AbleForCausalLM(Base):\n    pass\n",
    "unable.py": "import torch_that_must_not_be_imported\n\n\nclass UnableForCausalLM(torch_that_must_not_be_imported.Module):\n    pass\n",
    "wrapped/__init__.py": "from ..base import Base\n\n\nclass Mixin: ...\n\n\nclass Wrapped(Mixin, Base): ...\n",
    "registry.py": """
from dataclasses import dataclass


@dataclass
class Lazy:
    module_name: str
    class_name: str


class ModelRegistry:
    models = {
        "AbleForCausalLM": Lazy("vllm.model_executor.models.able", "AbleForCausalLM"),
        "UnableForCausalLM": Lazy("vllm.model_executor.models.unable", "UnableForCausalLM"),
        "Wrapped": Lazy("vllm.model_executor.models.wrapped", "Wrapped"),
    }
""",
}


def write_engine(site: Path, types: str = '"llama", "qwen", "minicpm"', version: str = "0.19.0") -> Path:
    files = {
        "vllm/__init__.py": "",
        "vllm/_version.py": f"__version__ = version = {version!r}\n",
        "vllm/utils/__init__.py": "",
        "vllm/utils/cpu_triton_utils.py": FAULTY,
        "vllm/config/__init__.py": "",
        "vllm/config/speculative.py": GATE.format(types=types),
        "vllm/model_executor/__init__.py": "",
        "vllm/model_executor/models/__init__.py": "",
    } | {f"vllm/model_executor/models/{name}": text for name, text in MODELS.items()}
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return site


def _forget() -> None:
    from draftsmith.engine.plugin_src.draftsmith_vllm import hooks, interface

    for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
        del sys.modules[name]
    hooks._finder.waiting.clear()
    interface._file.cache_clear()


@contextmanager
def importable(site: Path) -> Iterator[None]:
    """`site` first on the path; every trace of the made-up engine is gone afterwards."""
    _forget()
    sys.path.insert(0, str(site))
    try:
        yield
    finally:
        sys.path.remove(str(site))
        _forget()
