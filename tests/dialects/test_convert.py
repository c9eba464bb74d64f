"""Conversion: every ordered pair of dialects, and the public variants of each, end as the same drafter."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.check.dialect import SIGNED
from draftsmith.contract import Contract, NormSwitches, TargetFacts
from draftsmith.dialects import foreign, others
from draftsmith.dialects.checkpoint import Checkpoint, tensor_shapes
from draftsmith.dialects.convert import convert_folder
from draftsmith.drafter.config import DrafterConfig, MlaSizes
from draftsmith.errors import UserError

DIALECTS = ("vllm", "speculators", "sglang", "eagle")
LAYERS = 8
MLA = MlaSizes(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)


def drafter(contract=True, signed=False, **changes):
    fields = {
        "hidden_size": 32, "target_hidden_size": 32, "vocab_size": 64, "draft_vocab_size": 16, "aux_layer_ids": [2, 4, 5],
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
        "rope": {"rope_theta": 1e6, "rope_type": "default"}, "max_position_embeddings": 4096,
    }  # fmt: skip
    config = DrafterConfig(**(fields | changes))
    torch.manual_seed(0)
    tensors = {n: torch.randn(s).bfloat16() for n, s in tensor_shapes(config).items()}
    ids = (
        torch.arange(config.draft_vocab_size) * 3 + 5
        if config.draft_vocab_size < 20
        else torch.arange(config.draft_vocab_size)
    )
    tensors["d2t"] = ids - torch.arange(config.draft_vocab_size)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    facts = TargetFacts(name="t", config_hash="h", architecture="LlamaForCausalLM", model_type="llama", outer_model_type="llama",
                        hidden_size=32, num_layers=LAYERS, vocab_size=64)  # fmt: skip
    return Checkpoint(
        config,
        tensors,
        Contract(target=facts, aux_layer_ids=config.aux_layer_ids if signed else None) if contract else None,
    )


def same(a, b, contract=True):
    assert a.config == b.config
    assert set(a.tensors) == set(b.tensors)
    for name, tensor in a.tensors.items():
        assert tensor.dtype == b.tensors[name].dtype and torch.equal(tensor, b.tensors[name]), name
    if contract:
        assert a.contract == b.contract


@pytest.mark.parametrize(("first", "second"), itertools.permutations(DIALECTS, 2))
def test_every_pair_keeps_the_drafter(tmp_path, first, second):
    source = drafter()
    others.write(first, source, tmp_path / "a")
    same(foreign.read(tmp_path / "a"), source)
    convert_folder(tmp_path / "a", tmp_path / "b", second)
    same(foreign.read(tmp_path / "b"), source)
    convert_folder(tmp_path / "b", tmp_path / "c", first)
    for name in ("config.json", "model.safetensors", "contract.json"):
        assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "a" / name).read_bytes(), (
            f"{name} is not byte-exact after a round trip"
        )


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "changes",
    [
        {"norms": NormSwitches(fc_norm=True, norm_output=True)},
        {"norms": NormSwitches(norm_before_fc=True)},
        {"rope": {"rope_theta": 5e4, "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}},
        {"aux_layer_ids": [3, 5, 8]},
        {"aux_layer_ids": [1, 3, 4, 7], "num_aux_layers": 4},
        {"form": "mla", "mla": MLA, "num_key_value_heads": 4},
        {"attention_bias": True},
        {"draft_vocab_size": 64},
    ],
)
def test_variants_survive(tmp_path, dialect, changes):
    source = drafter(signed=True, **changes)
    others.write(dialect, source, tmp_path / "a")
    same(foreign.read(tmp_path / "a"), source)


@pytest.mark.parametrize(
    ("dialect", "changes", "says"),
    [
        ("speculators", {"form": "mla", "mla": MLA}, "MLA"),
        ("speculators", {"target_hidden_size": 48, "own_embedding": True}, "width"),
        ("sglang", {"norms": NormSwitches(norm_before_residual=True)}, "norm_before_residual"),
        ("sglang", {"aux_layer_ids": [0, 4, 5]}, "aux id 0"),
        ("eagle", {"norms": NormSwitches(fc_norm=True)}, "fc_norm"),
        ("eagle", {"aux_layer_ids": [1, 3, 4]}, "aux ids"),
        ("eagle", {"contract": False}, "contract"),
        ("eagle", {"target_hidden_size": 48, "own_embedding": True}, "width"),
        ("vllm", {"form": "mla", "mla": MLA, "norms": NormSwitches(norm_before_fc=True)}, "norm_before_fc"),
        ("vllm", {"aux_layer_ids": None}, "aux layers"),
    ],
)
def test_what_a_dialect_cannot_express_is_refused_by_name(tmp_path, dialect, changes, says):
    with pytest.raises(UserError, match=says):
        others.write(dialect, drafter(**changes), tmp_path / "a")
    assert not (tmp_path / "a" / "config.json").exists()


def vary(folder, config=lambda c: c, tensors=lambda t: t):
    """Rewrite an exported folder as a public variant of it, which does not say what its ids mean."""
    raw = json.loads((folder / "config.json").read_text())
    raw.pop(SIGNED, None)
    (folder / "config.json").write_text(json.dumps(config(raw)))
    changed = tensors(load_file(folder / "model.safetensors"))
    save_file({k: v.contiguous() for k, v in changed.items()}, folder / "model.safetensors")


def without(*keys):
    return lambda c: {k: v for k, v in c.items() if k not in keys}


def renamed(old, new):
    return lambda t: {k.replace(old, new): v for k, v in t.items()}


def prefixed(prefix):
    return lambda t: {k if k in ("d2t", "t2d") else prefix + k: v for k, v in t.items()}


def fused(t):
    a, m = "midlayer.self_attn.", "midlayer.mlp."
    qkv = torch.cat([t.pop(f"{a}{p}_proj.weight") for p in "qkv"])
    gate_up = torch.cat([t.pop(f"{m}{p}_proj.weight") for p in ("gate", "up")])
    return t | {f"{a}qkv_proj.weight": qkv, f"{m}gate_up_proj.weight": gate_up}


def absolute(t):
    return t | {"d2t": t["d2t"] + torch.arange(t["d2t"].numel())}


def nested(ids):
    return lambda c: (
        without("eagle_aux_hidden_state_layer_ids")(c) | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    )


VARIANTS = {
    "layers.0 names": ("vllm", {"tensors": renamed("midlayer.", "layers.0.")}),
    "model. prefix (Automodel)": ("vllm", {"tensors": prefixed("model.")}),
    "draft_model. prefix (SpecForge training)": ("sglang", {"tensors": prefixed("draft_model.")}),
    "compiled module prefix": ("vllm", {"tensors": prefixed("_orig_mod.")}),
    "verifier's norm kept": ("speculators", {"tensors": lambda t: t | {"verifier_norm.weight": torch.ones(32)}}),
    "fused q/k/v and gate/up": ("vllm", {"tensors": fused}),
    "absolute d2t": ("vllm", {"tensors": absolute}),
    "absolute d2t, no t2d": ("vllm", {"tensors": lambda t: {k: v for k, v in absolute(t).items() if k != "t2d"}}),
    "d2t int32": ("vllm", {"tensors": lambda t: t | {"d2t": t["d2t"].int()}}),
    "d2t float32": ("vllm", {"tensors": lambda t: t | {"d2t": t["d2t"].float()}}),
    "t2d uint8": ("sglang", {"tensors": lambda t: t | {"t2d": t["t2d"].to(torch.uint8)}}),
    "no t2d": ("vllm", {"tensors": lambda t: {k: v for k, v in t.items() if k != "t2d"}}),
    "no d2t but t2d": ("vllm", {"tensors": lambda t: {k: v for k, v in t.items() if k != "d2t"}}),
    "old rope keys": ("vllm", {"config": without("rope_parameters")}),
    "new rope keys": ("vllm", {"config": without("rope_theta")}),
    "rope_scaling null": ("vllm", {"config": lambda c: without("rope_parameters")(c) | {"rope_scaling": None}}),
    "rope per layer type": (
        "vllm",
        {"config": lambda c: without("rope_theta")(c) | {"rope_parameters": {"full_attention": c["rope_parameters"]}}},
    ),
    "mrope keys": (
        "vllm",
        {
            "config": lambda c: (
                without("rope_parameters")(c) | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
            )
        },
    ),
    "no head_dim": ("vllm", {"config": without("head_dim")}),
    "no draft_vocab_size": ("vllm", {"config": without("draft_vocab_size")}),
    "nested ids, SGLang meaning": ("vllm", {"config": nested([1, 3, 4])}),
    "nested ids, our meaning": ("vllm", {"config": nested([2, 4, 5])}),
    "no ids at all (SafeAILab)": (
        "vllm",
        {"config": without("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states")},
    ),
    "no target_hidden_size": ("vllm", {"config": without("target_hidden_size")}),
    "speculators without norm_before_residual": ("speculators", {"config": without("norm_before_residual")}),
    "Eagle3LlamaForCausalLM (AngelSlim)": (
        "vllm",
        {"config": lambda c: c | {"architectures": ["Eagle3LlamaForCausalLM"]}},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_public_variant_is_read_as_the_same_drafter(tmp_path, name, to):
    dialect, change = VARIANTS[name]
    source = drafter()
    others.write(dialect, source, tmp_path / "a")
    vary(tmp_path / "a", **change)
    same(foreign.read(tmp_path / "a"), source)
    result = convert_folder(tmp_path / "a", tmp_path / "b", to)
    assert result["notes"], "what was found is said"
    same(foreign.read(tmp_path / "b"), source)


def test_unclear_ids_are_refused_until_told(tmp_path):
    others.write("vllm", drafter(contract=False), tmp_path / "a")
    vary(tmp_path / "a", config=nested([3, 4, 5]))
    with pytest.raises(UserError, match="not clear what the aux ids"):
        foreign.read(tmp_path / "a")
    assert foreign.read(tmp_path / "a", aux_meaning="output").config.aux_layer_ids == [4, 5, 6]
    assert foreign.read(tmp_path / "a", aux_meaning="entering").config.aux_layer_ids == [3, 4, 5]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"tensors": lambda t: {k: v for k, v in t.items() if "hidden_norm" not in k}},
            "missing: layers.0.hidden_norm.weight",
        ),
        ({"tensors": lambda t: t | {"extra.weight": torch.ones(2)}}, "unexpected: extra.weight"),
        ({"tensors": lambda t: {k: v for k, v in t.items() if k not in ("d2t", "t2d")}}, "has no d2t"),
        ({"tensors": lambda t: t | {"d2t": t["d2t"].float() + 0.5}}, "no integers"),
        ({"tensors": lambda t: t | {"t2d": ~t["t2d"]}}, "t2d is not the inverse"),
        ({"tensors": lambda t: t | {"mask_hidden": torch.ones(96)}}, "P-EAGLE"),
        ({"config": lambda c: c | {"num_hidden_layers": 2}}, "2 layers"),
        ({"config": lambda c: c | {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}}, "longrope"),
        ({"config": lambda c: c | {"hidden_size": None}}, "hidden_size"),
    ],
)
def test_what_is_not_understood_is_refused_and_nothing_is_written(tmp_path, change, says):
    others.write("vllm", drafter(), tmp_path / "a")
    vary(tmp_path / "a", **change)
    with pytest.raises(UserError, match=says):
        convert_folder(tmp_path / "a", tmp_path / "b", "vllm")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_pickle_needs_the_flag(tmp_path):
    source = drafter()
    others.write("eagle", source, tmp_path / "a")
    torch.save(load_file(tmp_path / "a/model.safetensors"), tmp_path / "a/pytorch_model.bin")
    (tmp_path / "a/model.safetensors").unlink()
    with pytest.raises(UserError, match="pickle"):
        foreign.read(tmp_path / "a")
    same(foreign.read(tmp_path / "a", allow_pickle=True), source)


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def test_pickle_with_code_is_refused_even_with_the_flag(tmp_path, capsys):
    others.write("eagle", drafter(), tmp_path / "a")
    torch.save({"fc.weight": Evil()}, tmp_path / "a/pytorch_model.bin")
    (tmp_path / "a/model.safetensors").unlink()
    with pytest.raises(UserError, match="weights alone"):
        foreign.read(tmp_path / "a", allow_pickle=True)
    assert "code ran" not in capsys.readouterr().out


def test_deepseek_class_ids_are_written_as_sglang_reads_them(tmp_path):
    for ids, written in (([2, 4, 5], [1, 3, 4]), ([3, 4, 6], [3, 4, 6])):
        source = drafter(aux_layer_ids=ids)
        source.contract.target.architecture = "KimiK25ForConditionalGeneration"
        assert others.sglang_ids(source) == written


def test_missing_output_bias_becomes_zeros(tmp_path):
    """With attention_bias vLLM's o_proj has a bias too; a file of q/k/v biases alone would leave it uninitialised."""
    others.write("vllm", drafter(attention_bias=True), tmp_path / "a")
    vary(tmp_path / "a", tensors=lambda t: {k: v for k, v in t.items() if k != "midlayer.self_attn.o_proj.bias"})
    read = foreign.read(tmp_path / "a")
    assert not read.tensors["layers.0.self_attn.o_proj.bias"].any() and any("o_proj.bias" in n for n in read.notes)


def test_output_folder_must_be_empty(tmp_path):
    others.write("vllm", drafter(), tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "old").write_text("x")
    with pytest.raises(UserError, match="not empty"):
        convert_folder(tmp_path / "a", tmp_path / "b", "sglang")


def test_a_folder_that_is_not_there_is_said_to_be_so(tmp_path):
    with pytest.raises(UserError, match="there is no drafter at"):
        foreign.read(tmp_path / "nowhere")
