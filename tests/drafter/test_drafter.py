"""The module: names, shapes and what is saved."""

import pytest
import torch

from draftsmith.dialects.checkpoint import tensor_shapes
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter

BASE = {
    "hidden_size": 16,
    "target_hidden_size": 16,
    "vocab_size": 40,
    "draft_vocab_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "norms": {"norm_before_fc": True, "fc_norm": True}},
        {"hidden_size": 20, "own_embedding": True, "num_aux_layers": 2},
        {"form": "mla", "mla": MLA, "num_key_value_heads": 4},
        {"form": "mla", "mla": MLA | {"q_lora_rank": None}, "num_key_value_heads": 4},
    ],
)
def test_tensors_are_exactly_the_native_inventory(changes):
    config = DrafterConfig.model_validate(BASE | changes)
    found = {n: tuple(t.shape) for n, t in Drafter(config).state_dict().items()}
    assert found == tensor_shapes(config)


def test_lent_embedding_is_neither_saved_nor_trained():
    model = Drafter(DrafterConfig.model_validate(BASE))
    with pytest.raises(RuntimeError, match="attach_embedding"):
        model.embed(torch.zeros(2, dtype=torch.int64))
    table = torch.randn(40, 16)
    model.attach_embedding(table)
    assert torch.equal(model.embed(torch.tensor([3, 7])), table[[3, 7]])
    assert not any("embed" in n for n in model.state_dict())
    assert not any("embed" in n for n, _ in model.trained())
    with pytest.raises(ValueError, match="embedding"):
        model.attach_embedding(torch.randn(41, 16))


def test_a_draft_vocab_of_another_size_is_refused():
    model = Drafter(DrafterConfig.model_validate(BASE))
    with pytest.raises(ValueError, match="draft vocab of 23"):
        model.set_vocab(torch.zeros(23, dtype=torch.int64), torch.zeros(40, dtype=torch.bool))
    assert model.draft_to_target(torch.arange(24)).tolist() == list(range(24))
