"""Tiny random drafters and packed batches, made in milliseconds."""

import torch

from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter
from draftsmith.train.batch import StepBatch
from draftsmith.train.objective import TargetHead

V, D, G = 40, 24, 16


def tiny_config(**changes):
    base = {
        "hidden_size": 16,
        "target_hidden_size": G,
        "aux_layer_ids": [1, 2, 3],
        "vocab_size": V,
        "draft_vocab_size": D,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 24,
        "max_position_embeddings": 128,
    }
    return DrafterConfig.model_validate(base | changes)


def tiny_drafter(config=None, dtype=torch.float64, seed=0):
    """Random weights, norms included, and a draft vocab that is not the first D tokens."""
    config = config or tiny_config()
    torch.manual_seed(seed)
    model = Drafter(config).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.rand_like(p) + 0.5 if "norm" in name else torch.randn_like(p) * 0.3)
    if not config.own_embedding:
        model.attach_embedding(torch.randn(config.vocab_size, config.hidden_size, dtype=dtype))
    chosen = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    model.set_vocab(chosen - torch.arange(config.draft_vocab_size), t2d)
    return model


def tiny_head(model, dtype=torch.float64, seed=1):
    gen = torch.Generator().manual_seed(seed)
    g = model.config.target_hidden_size
    return TargetHead(
        torch.rand(g, generator=gen, dtype=dtype) + 0.5,
        1e-5,
        torch.randn(model.config.draft_vocab_size, g, generator=gen, dtype=dtype),
    )


def document(length, boundary, seed, config=None, dtype=torch.float64):
    """One row of random states; half of the target's choices lie anywhere in the vocab."""
    config = config or tiny_config()
    gen = torch.Generator().manual_seed(1000 + seed)
    index = torch.arange(length)
    return StepBatch(
        token_ids=torch.randint(config.vocab_size, (length,), generator=gen),
        aux=torch.randn(length, config.num_aux_layers * config.target_hidden_size, generator=gen, dtype=dtype),
        final=torch.randn(length, config.target_hidden_size, generator=gen, dtype=dtype)
        * (index >= boundary - 1)[:, None],
        final_valid=index >= boundary - 1,
        argmax=torch.randint(config.vocab_size, (length,), generator=gen),
        answer=index >= boundary,
        doc=torch.zeros(length, dtype=torch.int32),
        position=index,
    )
