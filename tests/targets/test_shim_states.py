"""In the real vLLM on the CPU: for classes without the EAGLE-3 interface the shim's aux states are transformers' hooked
streams, and the answers with and without speculation are the same tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import _families

pytestmark = pytest.mark.engine

NAMES = ("Gemma-3", "GLM-4.5", "Mixtral", "OLMoE", "Gemma-2", "GLM-4")
AUX = [0, 2, 5, 8]
"""The embedding, two layers in the middle, and the stream after the last layer."""
TOKENS = 24


def write_drafter(folder: Path, hidden: int) -> None:
    import torch

    from draftsmith.dialects import vllm
    from draftsmith.dialects.checkpoint import Checkpoint
    from draftsmith.drafter.config import DrafterConfig
    from draftsmith.drafter.model import Drafter

    config = DrafterConfig(
        hidden_size=hidden, target_hidden_size=hidden, num_aux_layers=len(AUX), aux_layer_ids=AUX,
        vocab_size=_families.VOCAB, draft_vocab_size=_families.VOCAB // 2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=64, intermediate_size=128,
    )  # fmt: skip
    torch.manual_seed(1)
    vllm.write(Checkpoint(config, dict(Drafter(config).state_dict())), folder, dtype="float32")


def run_side(engine: Any, cases: list[Path], env: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """states_side.py over the cases with the plugin on the path; name → out.json."""
    from draftsmith.engine.inject import plugin_env

    whole = os.environ | plugin_env(engine.package.parent, base={}) | (env or {})
    side = Path(__file__).with_name("states_side.py")
    command = [str(engine.python), str(side), *map(str, cases)]
    done = subprocess.run(command, env=whole, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {c.name: json.loads((c / "out.json").read_text()) for c in cases}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Per family a folder with the speculative case, and one beside it with the plain engine's."""
    root, found = tmp_path_factory.mktemp("shim"), {}
    for name in NAMES:
        family, case = _families.family(name), root / name
        _families.write_target(family, case / "target")
        write_drafter(case / "drafter-eagle3", (_families.BASE | family.config)["hidden_size"])
        asked = {"prompt": [(37 * i + 11) % 250 + 5 for i in range(40)], "max_tokens": TOKENS}
        (case / "case.json").write_text(json.dumps(asked))
        plain = root / f"{name} plain"
        plain.mkdir()
        (plain / "target").symlink_to(case / "target")
        (plain / "case.json").write_text(json.dumps(asked | {"plain": True}))
        found[name], found[f"{name} plain"] = case, plain
    return found


@pytest.fixture(scope="module")
def results(cases: dict[str, Path], real_engine: Any) -> dict[str, dict[str, Any]]:
    return run_side(real_engine, list(cases.values()))


@pytest.mark.parametrize("name", NAMES)
def test_the_states_are_transformers_own(name: str, cases: dict[str, Path], results: dict[str, dict[str, Any]]) -> None:
    import torch
    from safetensors.torch import load_file

    from draftsmith.extract.self_check import AGREES_FLOAT32, relative_l2
    from draftsmith.extract.transformers_backend import TransformersStates

    result, plain = results[name], results[f"{name} plain"]
    assert "error" not in result, result["error"]
    assert "error" not in plain, plain["error"]
    assert result["owned"] is False
    case = cases[name]
    prompt = json.loads((case / "case.json").read_text())["prompt"]
    ours = load_file(case / "out.safetensors")["aux"]
    streams = TransformersStates(case / "target", AUX, dtype=torch.float32, device="cpu").streams([prompt], AUX)
    far = {k: relative_l2(ours[:, i], streams[k][0]) for i, k in enumerate(AUX)}
    print(name, far)
    assert max(far.values()) <= AGREES_FLOAT32, far
    assert len(result["tokens"]) == TOKENS and result["tokens"] == plain["tokens"]
    assert result["counters"]["vllm:spec_decode_num_drafts"] > 0
