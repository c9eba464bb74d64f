"""A store of random states in memory, and a target that is easy to learn: its choices follow from the aux states."""

from types import SimpleNamespace

import torch
from tiny_drafters import G, V, tiny_config

from draftsmith.contract import Contract, TargetFacts


def contract(config=None):
    config = config or tiny_config()
    return Contract(
        target=TargetFacts(
            name="tiny",
            config_hash="0" * 64,
            architecture="LlamaForCausalLM",
            model_type="llama",
            outer_model_type="llama",
            hidden_size=G,
            num_layers=6,
            vocab_size=V,
        ),
        aux_layer_ids=config.aux_layer_ids,
        final_state="pre_norm",
        draft_vocab_size=config.draft_vocab_size,
    )


def states(length, boundary, seed, config=None, head=None):
    """Random states; `head` makes the argmax the one of the final states over its draft rows (ids 0…D-1)."""
    config = config or tiny_config()
    gen = torch.Generator().manual_seed(seed)
    aux = torch.randn(length, config.num_aux_layers, config.target_hidden_size, generator=gen).bfloat16()
    start = max(boundary - 1, 0)
    final = torch.randn(length - start, config.target_hidden_size, generator=gen).bfloat16()
    choice = torch.randint(config.vocab_size, (length - start,), generator=gen)
    if head is not None:
        choice = head(final.float())
    return SimpleNamespace(
        token_ids=torch.randint(config.vocab_size, (length,), generator=gen),
        boundary=boundary,
        aux=aux,
        final_start=start,
        final=final,
        argmax=choice,
        topk=None,
        tokens=length,
    )


class FakeStore:
    """The reading side of extract.store.StateStore."""

    def __init__(self, rows, facts=None):
        self.rows = rows
        self.contract = facts or contract()
        self.index = [
            SimpleNamespace(row_id=name, tokens=s.tokens, boundary=s.boundary, final_start=s.final_start)
            for name, s in rows.items()
        ]
        self.reads = []

    def read(self, row_id):
        return self.rows[row_id]

    def read_many(self, row_ids):
        for row_id in row_ids:
            self.reads.append(row_id)
            yield row_id, self.rows[row_id]


def fake_store(count=24, seed=0, config=None):
    gen = torch.Generator().manual_seed(seed)
    rows = {}
    for i in range(count):
        length = int(torch.randint(8, 30, (1,), generator=gen))
        boundary = int(torch.randint(2, length - 4, (1,), generator=gen))
        rows[f"row-{i}"] = states(length, boundary, 100 * seed + i, config)
    return FakeStore(rows)
