"""Both sides of a parity replay: they agree on sound files, and the first disagreement is named with its switch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.bench.parity import parity
from draftsmith.diagnose.subject import SampleRow, Subject
from draftsmith.dialects import foreign, vllm
from draftsmith.dialects.checkpoint import Checkpoint, tensor_shapes
from draftsmith.drafter.config import DrafterConfig
from draftsmith.errors import UserError

V, D, G, T, STEPS = 320, 40, 64, 20, 3
MLA = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias_llama3": {"attention_bias": True, "rope": LLAMA3, "norms": {"norm_before_residual": True, "norm_before_fc": True}},
    "three_one_yarn": {"norms": {"fc_norm": True, "norm_output": True}, "rope": YARN},
    "own_table_linear": {"own_embedding": True, "rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "mla": {"form": "mla", "mla": MLA, "num_key_value_heads": 4},
    "mla_yarn": {"form": "mla", "mla": MLA, "num_key_value_heads": 4, "rope": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
}  # fmt: skip

Make = Callable[..., Subject]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def of(**changes: Any) -> Subject:
        config = DrafterConfig.model_validate(
            {
                "hidden_size": G, "target_hidden_size": G, "vocab_size": V, "draft_vocab_size": D, "aux_layer_ids": [2, 4, 5],
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 48,
                "max_position_embeddings": 256,
            }
            | changes
        )  # fmt: skip
        gen = torch.Generator().manual_seed(3)
        tensors = {}
        for name, shape in tensor_shapes(config).items():
            x = torch.randn(shape, generator=gen)
            tensors[name] = x.abs() * 0.2 + 0.8 if "norm" in name else x * shape[-1] ** -0.5
        ids = torch.randperm(V, generator=gen)[:D].sort().values
        tensors["d2t"] = ids - torch.arange(D)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
        folder, target = tmp_path / "drafter-eagle3", tmp_path / "target"
        vllm.write(Checkpoint(config, tensors), folder, dtype="float32")
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text(json.dumps({"rope_theta": 1e4, "num_hidden_layers": 8, "hidden_size": G}))
        checkpoint = foreign.read(folder, target_layers=8)
        return Subject(folder, target, checkpoint, [], torch.randn(V, G, generator=gen), 8)

    return of


def row(seed: int = 0) -> SampleRow:
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V, (T,), generator=gen).tolist()
    return SampleRow("r", "s", tokens, 6, torch.randn(9, T, G, generator=gen), torch.randint(0, V, (T,), generator=gen))


@pytest.mark.parametrize("form", FORMS)
def test_a_second_reading_agrees(make: Make, form: str) -> None:
    found = parity(make(**FORMS[form]), [row(), row(1)], STEPS, None)
    assert found["first"] is None, found
    assert [s["stage"] for s in found["stages"]].count("proposals") == STEPS
    assert (found["rows"], found["tokens"]) == (2, 2 * T)


def edited(subject: Subject, **changes: Any) -> Subject:
    """The trainer's side as it was; the file's keys changed under it."""
    path = subject.drafter / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return subject


SWITCHES: dict[str, tuple[dict[str, Any], str, str, int | None]] = {
    "norm_before_residual": ({"norm_before_residual": True}, "norms.switch", "state", 0),
    "norm_output": ({"norm_output": True}, "norms.switch", "state", 0),
    "rope": (
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_theta": 1e6},
        "rope",
        "state",
        0,
    ),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_first_disagreement_is_named_with_its_switch(make: Make, switch: str) -> None:
    changes, suspect, stage, step = SWITCHES[switch]
    found = parity(edited(make(), **changes), [row()], STEPS, None)
    assert (found["first"]["stage"], found["first"]["step"]) == (stage, step)
    assert found["first"]["distance"] > 1e-3
    assert found["suspects"][0]["id"] == suspect and found["suspects"][0]["distance"] < 1e-4


def test_a_changed_map_shows_in_the_proposals_alone(make: Make) -> None:
    subject = make()
    subject.checkpoint.tensors["d2t"] = subject.checkpoint.tensors["d2t"] + 1
    found = parity(subject, [row()], STEPS, None)
    assert (found["first"]["stage"], found["first"]["step"]) == ("proposals", 0)
    assert found["suspects"][0]["id"] == "map.shift"


def test_a_damaged_tensor_is_no_switch(make: Make) -> None:
    subject = make()
    subject.checkpoint.tensors["fc.weight"] = subject.checkpoint.tensors["fc.weight"] * 1.01
    found = parity(subject, [row()], STEPS, None)
    assert found["first"]["stage"] == "fused" and "fc.weight" in found["first"]["where"]
    assert not [s for s in found["suspects"] if s["distance"] <= 1e-3]


def test_files_that_cannot_be_read_twice(make: Make) -> None:
    subject = make()
    (subject.drafter / "model.safetensors").unlink()
    with pytest.raises(UserError, match="second time"):
        parity(subject, [row()], STEPS, None)


@pytest.mark.engine
@pytest.mark.parametrize("form", ["plain", "three_one_yarn", "own_table_linear", "mla"])
def test_the_engines_own_class(make: Make, tiny_target: Path, real_engine: Any, form: str) -> None:
    """It agrees at every step; a switch that is changed in the files alone is found, and by name."""
    subject = make(**FORMS[form])
    subject.target = tiny_target
    found = parity(subject, [row()], STEPS, real_engine)
    assert found["first"] is None, found
    assert found["class"].startswith("Eagle3") and found["engine"] == real_engine.label
    if form == "plain":
        found = parity(edited(subject, norm_output=True), [row()], STEPS, real_engine)
        assert found["first"]["stage"] == "state" and found["suspects"][0]["id"] == "norms.switch"
        assert "norm_output" in found["suspects"][0]["what"]
