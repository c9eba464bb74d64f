"""The small worlds in which the docs' commands are run: tiny random models under the names that the pages use."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
K2, K25 = "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"
FIRST = "docs/guides/first-drafter.md"
STORY = """(APIServer pid=71) INFO 11-30 09:01:12 [api_server.py:1] vLLM API server version 0.16.0
(APIServer pid=71) pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig
(APIServer pid=71)   Value error, Eagle3 is only supported for ['llama', 'qwen', 'minicpm'] models. Got self.target_model_config.hf_text_config.model_type='kimi_k2' [type=value_error, input_value=ArgsKwargs((), {'model': ..., 'target': 1}), input_type=ArgsKwargs]
(APIServer pid=71)     For further information visit https://errors.pydantic.dev/2.12/v/value_error
"""  # noqa: E501


def _module(path: str) -> Any:
    """A helper of the tests, by its path: several folders have modules of one name."""
    name = "docs_world_" + Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TESTS / path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _engine(world: Path, write: Callable[[Path], Any]) -> None:
    """A made-up vLLM's source as an environment with an interpreter; it can be read, not run."""
    site = world / "vllm-env" / "lib" / "python3.11" / "site-packages"
    write(site)
    (world / "vllm-env" / "bin").mkdir()
    (world / "vllm-env" / "bin" / "python").symlink_to(sys.executable)


def _model(world: Path) -> None:
    _module("conftest.py").write_tiny_llama(world / "my-model")
    lines = [json.dumps({"prompt": f"What is {i} plus {i * 7 % 11}?"}) + "\n" for i in range(16)]
    (world / "prompts.jsonl").write_text("".join(lines))
    _engine(world, lambda site: _module("mutants/engine_tree.py").write_engine(site, "modern-v1"))


def _drafter(folder: Path) -> None:
    """A random drafter for my-model, as an export writes it."""
    import torch

    from draftsmith.dialects import vllm
    from draftsmith.dialects.checkpoint import Checkpoint, tensor_shapes
    from draftsmith.drafter.config import DrafterConfig

    config = DrafterConfig(
        hidden_size=64, target_hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=320, draft_vocab_size=96, aux_layer_ids=[2, 4, 5], rms_norm_eps=1e-6,
        max_position_embeddings=512, rope={"rope_type": "default", "rope_theta": 10000.0}, own_embedding=False,
    )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    tensors = {
        n: torch.randn(s, generator=g) * 0.02 for n, s in tensor_shapes(config).items() if n not in ("d2t", "t2d")
    }
    t2d = torch.zeros(320, dtype=torch.bool)
    t2d[:96] = True
    point = Checkpoint(config, tensors | {"d2t": torch.zeros(96, dtype=torch.int64), "t2d": t2d})
    vllm.write(point.cast(torch.bfloat16), folder)


def _gate(world: Path) -> None:
    _model(world)
    _drafter(world / "my-drafter")
    shutil.copytree(world / "my-drafter", world / "broken-drafter")
    config = json.loads((world / "broken-drafter" / "config.json").read_text())
    (world / "broken-drafter" / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))


def _tune(world: Path) -> None:
    _model(world)
    _drafter(world / "their-drafter")


def _named(site: Path) -> None:
    """A made-up vLLM 0.16 whose capable class is called as Kimi-K2's, its incapable one as Kimi-K2.5's."""
    _module("engine/remedy/remedy_engine.py").write_engine(site)
    for path in site.rglob("*.py"):
        text = path.read_text()
        for made_up, real in (("UnableForCausalLM", K25), ("AbleForCausalLM", K2)):
            text = text.replace(made_up, real)
        path.write_text(text)


def _huge(world: Path) -> None:
    """The config of a wrapped mixture of experts, and an engine whose list does not know it."""
    _engine(world, _named)
    target = _module("engine/remedy/remedy_engine.py").write_target(world / "huge-model", K25, "kimi_k25")
    config = json.loads((target / "config.json").read_text())
    inner = {k: v for k, v in config.items() if k not in ("architectures", "model_type")} | {"model_type": "kimi_k2"}
    wrapper = {"architectures": [K25], "model_type": "kimi_k25", "text_config": inner}
    (target / "config.json").write_text(json.dumps(wrapper))


def _refused(world: Path) -> None:
    _engine(world, _named)
    engine = _module("engine/remedy/remedy_engine.py")
    engine.write_target(world / "my-model", K2, "kimi_k2")
    engine.write_drafter(world / "my-drafter")
    (world / "server.log").write_text(STORY)


MAKERS: dict[str, Callable[[Path], None]] = {
    "README.md": _gate,
    "docs/index.md": _model,
    FIRST: _model,
    "docs/guides/fine-tune.md": _tune,
    "docs/guides/huge-target.md": _huge,
    "docs/guides/ci-gate.md": _gate,
    "docs/guides/engine-refuses.md": _refused,
}


def make_world(page: str, world: Path, finished: Path | None = None) -> Path:
    """The world of a page in the folder `world`. finished: the first guide's world after its walk, for pages that begin
    with a finished run (made if it is not given)."""
    if page in MAKERS:
        MAKERS[page](world)
        return world
    if finished is None:
        from blocks import walk

        finished = world / ".first"
        finished.mkdir()
        for _ in walk(FIRST, make_world(FIRST, finished), "fast"):
            pass
    for item in finished.iterdir():
        if item.name != ".first":
            target = world / item.name
            shutil.copytree(item, target, symlinks=True) if item.is_dir() else shutil.copy2(item, target)
    for record in world.glob("runs/*/*.json"):
        record.write_text(record.read_text().replace(str(finished), str(world)))
    return world
