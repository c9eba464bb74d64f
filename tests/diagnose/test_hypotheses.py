"""What-ifs undo the faults they are for: among a family's variants one gives back the score of the drafter before the
fault, to the last digit. Streams and weights are random; which setting is right is known because the fault was put in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.diagnose import hypotheses
from draftsmith.diagnose.replay import acceptance, score
from draftsmith.diagnose.subject import SampleRow, Setup, Subject
from draftsmith.dialects.checkpoint import Checkpoint, tensor_shapes
from draftsmith.drafter.config import DrafterConfig

LAYERS, G, V, D = 8, 16, 64, 24


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    config = DrafterConfig(
        hidden_size=G, target_hidden_size=G, vocab_size=V, draft_vocab_size=D, aux_layer_ids=[2, 4, 5], num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=24, rope={"rope_theta": 1e6, "rope_type": "default"},
    )  # fmt: skip
    gen = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=gen) * 0.3 for n, s in tensor_shapes(config).items()}
    ids = torch.arange(D) * 2 + 4
    tensors["d2t"] = ids - torch.arange(D)
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    rows = []
    for i in range(3):
        tokens = torch.randint(0, V, (20,), generator=gen)
        streams = torch.randn(LAYERS + 1, 20, G, generator=gen)
        rows.append(SampleRow(f"r{i}", "s", tokens.tolist(), 6, streams, torch.randint(0, V, (20,), generator=gen)))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "rope_theta": 1e6, "num_hidden_layers": LAYERS, "hidden_size": G})
    )
    table = torch.randn(V, G, generator=gen)
    return Subject(tmp_path, tmp_path, Checkpoint(config, tensors), rows, table, LAYERS)


def ids_(*ids: int) -> Callable[[Setup], Setup]:
    return lambda s: hypotheses._ids(s, ids)


def blocks_swapped(s: Setup) -> Setup:
    a, b, c = s.tensors["fc.weight"].split(G, dim=1)
    return s.with_tensors(**{"fc.weight": torch.cat([b, c, a], dim=1)})


def map_moved(s: Setup) -> Setup:
    return hypotheses._map(s, torch.arange(D) + s.tensors["d2t"] + 1)


def own_table(s: Setup) -> Setup:
    changed = s.with_config(own_embedding=True)
    wrong = torch.zeros(V, G)
    return Setup(changed.config, s.tensors | {"embed_tokens.weight": wrong}, s.aux_ids, s.blocks, s.embedding)


FAULTS: dict[str, tuple[str, Callable[[Setup], Setup]]] = {
    "first id one low": ("aux.one", ids_(1, 4, 5)),
    "last id one high": ("aux.one", ids_(2, 4, 6)),
    "all ids in the other numbering": ("aux.all", ids_(1, 3, 4)),
    "streams in another order": ("aux.order", blocks_swapped),
    "norm_before_residual": ("norms.switch", lambda s: s.with_norms(norm_before_residual=True)),
    "norm_output": ("norms.switch", lambda s: s.with_norms(norm_output=True)),
    "rope theta": ("rope", lambda s: s.with_config(rope={"rope_theta": 1e4, "rope_type": "default"})),
    "rope scaling": (
        "rope",
        lambda s: s.with_config(rope={"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0}),
    ),
    "map one off": ("map.shift", map_moved),
    "a stale table": ("embedding", own_table),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_family_holds_the_way_back(subject: Subject, fault: str) -> None:
    family_id, put_in = FAULTS[fault]
    good = subject.setup()
    wrong = put_in(good)
    best = score(good, subject.rows).mean
    assert abs(score(wrong, subject.rows).mean - best) > 1e-6, "the fault must be felt"
    family = next(f for f in hypotheses.FAMILIES if f.id == family_id)
    back = [score(v, subject.rows).mean for _, v in family.variants(subject, wrong)]
    assert min(abs(b - best) for b in back) < 1e-6


def test_a_gain_is_told_with_its_error(subject: Subject) -> None:
    good = score(subject.setup(), subject.rows)
    gain, error = good.gain_over(good)
    assert gain == 0 and error == 0


def test_an_undraftable_choice_is_a_miss(subject: Subject) -> None:
    """Tokens outside the draft vocab can never be proposed, whatever the drafter thinks."""
    for row in subject.rows:
        row.argmax.fill_(0)
    found = acceptance(subject.setup(), subject.rows, 3)
    assert found.accepted == [0, 0, 0] and found.drafts > 0
    assert score(subject.setup(), subject.rows).mean == pytest.approx(20.0)
