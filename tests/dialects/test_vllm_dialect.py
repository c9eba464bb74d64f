"""The vLLM dialect: nothing left to a default, every tensor accounted for, nothing incomplete written."""

import json

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.contract import NormSwitches
from draftsmith.dialects import native, vllm
from draftsmith.dialects.checkpoint import Checkpoint, tensor_shapes
from draftsmith.drafter.config import DrafterConfig, MlaSizes
from draftsmith.errors import UserError


def checkpoint(**changes):
    fields = {
        "hidden_size": 32, "target_hidden_size": 32, "vocab_size": 64, "draft_vocab_size": 16, "aux_layer_ids": [2, 4, 5],
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
    }  # fmt: skip
    config = DrafterConfig(**(fields | changes))
    torch.manual_seed(0)
    tensors = {n: torch.randn(s) for n, s in tensor_shapes(config).items()}
    ids = torch.arange(config.draft_vocab_size) * 3
    tensors["d2t"] = ids - torch.arange(config.draft_vocab_size)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return Checkpoint(config, tensors)


MLA = MlaSizes(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)


def test_config_leaves_nothing_to_a_default(tmp_path):
    vllm.write(checkpoint(), tmp_path / "x-eagle3")
    config = json.loads((tmp_path / "x-eagle3/config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and config["num_aux_hidden_states"] == 3
    for switch in NormSwitches.model_fields:
        assert config[switch] is False
    assert config["head_dim"] == 16 and config["vocab_size"] == 64 and config["draft_vocab_size"] == 16
    assert config["tie_word_embeddings"] is False
    assert "eagle_config" not in config
    assert not [k for k, v in config.items() if v is None]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6, "rope_type": "default"},
        {"rope_theta": 5e4, "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    ],
)
def test_rope_is_written_in_both_spellings(rope):
    keys = vllm.rope_keys(rope)
    assert keys["rope_parameters"] == rope and keys["rope_theta"] == rope["rope_theta"]
    assert ("rope_scaling" in keys) == (rope["rope_type"] != "default")
    if "rope_scaling" in keys:
        assert keys["rope_scaling"]["type"] == keys["rope_scaling"]["rope_type"] == "yarn"


@pytest.mark.parametrize("changes", [{}, {"form": "mla", "mla": MLA}, {"norms": NormSwitches(fc_norm=True, norm_output=True)},
                                     {"norms": NormSwitches(norm_before_fc=True)}, {"attention_bias": True}])  # fmt: skip
def test_every_tensor_is_written_byte_for_byte(tmp_path, changes):
    source = checkpoint(**changes)
    out = tmp_path / "x-eagle3"
    result = vllm.write(source, out)
    written = load_file(out / "model.safetensors")
    assert set(written) == {vllm.file_name(n) for n in source.tensors} and result["tensors"] == len(written)
    assert result["cast"] == ["float32"]
    for name, tensor in source.tensors.items():
        want = tensor if name in ("d2t", "t2d") else tensor.bfloat16()
        assert torch.equal(written[vllm.file_name(name)], want)


def test_mla_says_deepseek_v2(tmp_path):
    vllm.write(checkpoint(form="mla", mla=MLA), tmp_path / "x-eagle3")
    config = json.loads((tmp_path / "x-eagle3/config.json").read_text())
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and config["model_type"] == "deepseek_v2"


def break_(kind):
    source = checkpoint()
    t = source.tensors
    if kind == "missing":
        del t["layers.0.hidden_norm.weight"]
    elif kind == "extra":
        t["verifier_norm.weight"] = torch.ones(32)
    elif kind == "shape":
        t["fc.weight"] = torch.ones(32, 32)
    elif kind == "absolute":
        t["d2t"] = t["d2t"] + torch.arange(16) * 8
    elif kind == "dtype":
        t["d2t"] = t["d2t"].int()
    elif kind == "inverse":
        t["t2d"] = ~t["t2d"]
    elif kind == "ids":
        source.config.aux_layer_ids = None
    return source


@pytest.mark.parametrize("kind", ["missing", "extra", "shape", "absolute", "dtype", "inverse", "ids"])
def test_incomplete_checkpoint_is_refused_and_leaves_no_model(tmp_path, kind):
    with pytest.raises(UserError):
        vllm.write(break_(kind), tmp_path / "x-eagle3")
    assert not (tmp_path / "x-eagle3/config.json").exists()


def test_mla_cannot_take_norm_before_fc(tmp_path):
    with pytest.raises(UserError, match="norm_before_fc"):
        vllm.write(checkpoint(form="mla", mla=MLA, norms=NormSwitches(norm_before_fc=True)), tmp_path / "x")


def test_native_round_trip_is_exact(tmp_path):
    source = checkpoint()
    native.write(source, tmp_path / "best")
    back = native.read(tmp_path / "best")
    assert back.config == source.config
    assert all(torch.equal(back.tensors[n], t) for n, t in source.tensors.items())
    first = (tmp_path / "best/model.safetensors").read_bytes()
    native.write(source, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == first


def test_native_read_is_strict(tmp_path):
    native.write(checkpoint(), tmp_path / "best")
    (tmp_path / "best/drafter.json").unlink()
    with pytest.raises(UserError, match=r"drafter\.json is missing"):
        native.read(tmp_path / "best")
