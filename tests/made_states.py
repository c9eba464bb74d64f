"""A contract and rows of random states, made in milliseconds: what every test of a store, a stream or the trainer reads."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.contract import Contract, TargetFacts
from draftsmith.extract.states import States

G = 16
"""Width of the target."""


def facts(
    hidden: int = G, aux: Sequence[int] = (1, 3, 5), *, layers: int = 9, vocab: int = 99, **contract: Any
) -> Contract:
    """The contract of a small Llama. aux: layer ids."""
    target = TargetFacts(
        name="t",
        config_hash="0" * 64,
        architecture="LlamaForCausalLM",
        model_type="llama",
        outer_model_type="llama",
        hidden_size=hidden,
        num_layers=layers,
        vocab_size=vocab,
    )
    return Contract(target=target, aux_layer_ids=list(aux), final_state="pre_norm", **contract)


def states_of(
    tokens: int,
    boundary: int,
    seed: int,
    *,
    hidden: int = G,
    aux: int = 3,
    vocab: int = 99,
    head: Callable[[Tensor], Tensor] | None = None,
    argmax: bool = True,
) -> States:
    """One row of `tokens` tokens, a function of its arguments alone. head: final states [M, G] → their most likely tokens;
    none = random ones."""
    g = torch.Generator().manual_seed(seed)
    start = max(boundary - 1, 0)
    streams = torch.randn(tokens, aux, hidden, generator=g).bfloat16()
    final = torch.randn(tokens - start, hidden, generator=g).bfloat16()
    tops = torch.randint(vocab, (tokens - start,), generator=g)
    if head is not None:
        tops = head(final.float())
    ids = torch.randint(vocab, (tokens,), generator=g)
    return States(ids, boundary, streams, start, final, tops if argmax else None)
