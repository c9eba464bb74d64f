"""A store of random states in memory, and a target that is easy to learn: its choices follow from the aux states."""

from types import SimpleNamespace

import torch
from tiny_drafters import G, V, tiny_config

from made_states import facts, states_of


def contract(config=None):
    config = config or tiny_config()
    return facts(G, config.aux_layer_ids, layers=6, vocab=V, draft_vocab_size=config.draft_vocab_size)


def states(length, boundary, seed, config=None, head=None):
    """Random states, to be changed; `head` makes the argmax the one of the final states over its draft rows (ids 0…D-1)."""
    c = config or tiny_config()
    made = states_of(
        length, boundary, seed, hidden=c.target_hidden_size, aux=c.num_aux_layers, vocab=c.vocab_size, head=head
    )
    return SimpleNamespace(**vars(made), tokens=length)


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
