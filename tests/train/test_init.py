"""The drafter's shape and first weights from a target."""

import pytest
import torch

from draftsmith.contract import Contract
from draftsmith.drafter.model import Drafter
from draftsmith.errors import UserError
from draftsmith.recipe import DrafterSection
from draftsmith.target.config import load_config, target_facts
from draftsmith.target.weights import read_embedding, read_lm_head
from draftsmith.train.init import drafter_config, first_weights, rope_of, target_head


def contract_of(folder, **changes):
    base = {"aux_layer_ids": [2, 4, 5], "draft_vocab_size": 64, "final_state": "pre_norm"}
    return Contract(target=target_facts(folder), **(base | changes))


def test_shape_comes_from_the_target_unless_the_recipe_gives_it(tiny_target):
    cfg = load_config(tiny_target)
    found = drafter_config(DrafterSection(), cfg, contract_of(tiny_target))
    assert (found.hidden_size, found.num_attention_heads, found.num_key_value_heads) == (64, 4, 2)
    assert (found.head_dim, found.intermediate_size, found.own_embedding) == (16, 128, False)
    given = DrafterSection(hidden_size=96, head_dim=32, num_attention_heads=3, num_key_value_heads=1, norm_output=True)
    found = drafter_config(given, cfg, contract_of(tiny_target))
    assert (found.hidden_size, found.head_dim, found.num_attention_heads, found.own_embedding) == (96, 32, 3, True)
    assert found.norms.norm_output


def test_mla_takes_its_latent_sizes_from_an_mla_target_only(tiny_target):
    cfg = load_config(tiny_target)
    with pytest.raises(UserError, match="kv_lora_rank"):
        drafter_config(DrafterSection(form="mla"), cfg, contract_of(tiny_target))
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    found = drafter_config(DrafterSection(form="mla"), cfg | sizes, contract_of(tiny_target))
    assert found.mla is not None and found.mla.kv_lora_rank == 32
    with pytest.raises(UserError, match="q_lora_rank"):
        drafter_config(DrafterSection(form="mla"), cfg | sizes | {"q_lora_rank": None}, contract_of(tiny_target))
    with pytest.raises(UserError, match="norm_before_fc"):
        drafter_config(DrafterSection(form="mla", norm_before_fc=True), cfg | sizes, contract_of(tiny_target))


@pytest.mark.parametrize(
    ("text", "rope"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {},
                }
            },
            {"rope_theta": 1e6, "rope_type": "default"},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0}, "max_position_embeddings": 99},
            {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 99},
        ),
    ],
)
def test_rope_of_either_spelling(text, rope):
    assert rope_of(text) == rope


def started(folder, kind, seed=0):
    config = drafter_config(DrafterSection(), load_config(folder), contract_of(folder))
    model = Drafter(config)
    head = target_head(folder, list(range(10, 74)))
    return model, head, first_weights(model, folder, head, kind, seed, read_embedding(folder))


def test_first_weights_from_the_target(tiny_target):
    model, head, taken = started(tiny_target, "target")
    assert "lm_head" in taken
    rows = read_lm_head(tiny_target, rows=list(range(10, 74))).float() * head.norm_weight
    ratio = model.lm_head.weight / rows
    torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-3, atol=1e-5)
    state = torch.randn(4000, 64)
    assert float((state @ model.lm_head.weight.t()).std()) == pytest.approx(1.0, rel=0.05)


def test_first_weights_are_a_function_of_the_seed(tiny_target):
    for kind in ("target", "random"):
        a, b, c = (started(tiny_target, kind, seed)[0] for seed in (0, 0, 1))
        for name, p in a.named_parameters():
            assert torch.equal(p, b.get_parameter(name))
        assert not torch.equal(a.fc.weight, c.fc.weight)


def test_a_start_from_the_layer_takes_the_last_one(tiny_target):
    from draftsmith.target.weights import layer_weights

    model, _, taken = started(tiny_target, "layer")
    layer = layer_weights(tiny_target, load_config(tiny_target)["num_hidden_layers"] - 1)
    assert "lm_head" in taken and any(t.endswith("self_attn.q_proj.weight") for t in taken)
    own = model.layers[0]
    assert torch.equal(own.mlp.down_proj.weight, layer["mlp.down_proj.weight"].float())
    assert torch.equal(own.self_attn.k_proj.weight[:, 64:], layer["self_attn.k_proj.weight"].float())
    plain, _, _ = started(tiny_target, "target")
    assert torch.equal(own.self_attn.k_proj.weight[:, :64], plain.layers[0].self_attn.k_proj.weight[:, :64])


def test_the_teachers_head_gives_the_targets_own_logits(tiny_target):
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(tiny_target)
    seen = {}
    target.model.norm.register_forward_pre_hook(lambda m, args: seen.update(final=args[0]))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = target(ids).logits[0]
    head = target_head(tiny_target, list(range(10, 74)))
    torch.testing.assert_close(head.logits(seen["final"][0]), logits[:, 10:74], rtol=1e-4, atol=1e-4)
