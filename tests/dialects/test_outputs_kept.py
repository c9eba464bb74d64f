"""The property behind every conversion: what the drafter computes before is what it computes after, to the bit, or the
conversion is refused and nothing is written. Drafters are drawn at random; the aux layer that an id means counts too.
"""

import itertools
import random

import pytest
import torch
from test_convert import DIALECTS, LAYERS, MLA, VARIANTS, drafter, vary

from draftsmith.contract import NormSwitches
from draftsmith.dialects import foreign, others
from draftsmith.dialects.convert import convert_folder
from draftsmith.drafter.model import Drafter, Steps
from draftsmith.errors import UserError
from draftsmith.target.weights import read_embedding

ROWS, STEPS = 6, 3
ROPES = (
    {"rope_theta": 1e6, "rope_type": "default"},
    {"rope_theta": 5e4, "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0},
)  # fmt: skip


def outputs(checkpoint, embedding=None):
    """Target ids proposed [STEPS, ROWS] and logits [STEPS, ROWS, D] on a made-up target, whose stream entering each layer
    is known: an id that came to mean another layer gives other figures."""
    c = checkpoint.config
    g = torch.Generator().manual_seed(9)
    streams = torch.randn(LAYERS + 1, ROWS, c.target_hidden_size, generator=g)
    table = torch.randn(c.vocab_size, c.hidden_size, generator=g)
    model = Drafter(c).eval()
    model.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in checkpoint.tensors.items()})
    if model.embed_tokens is None:
        model.attach_embedding(table if embedding is None else embedding)
    ids, steps, found = torch.randint(c.vocab_size, (ROWS,), generator=g), Steps(spans=((0, ROWS),)), []
    with torch.no_grad():
        state = model.fuse(torch.cat([streams[k] for k in c.aux_layer_ids], dim=-1))
        for s in range(STEPS):
            normed, state = model.step(state, model.embed(ids), torch.arange(ROWS) + s, steps)
            logits = model.lm_head(normed)
            ids = model.draft_to_target(logits.argmax(-1))
            found += [ids.float()[:, None], logits]
    return torch.cat(found, dim=-1)


def draw(seed):
    """A random drafter: form, switches, ids, sizes, rope, number type, with or without its own table and a contract."""
    r = random.Random(seed)
    ids = r.choice([[2, 4, 5], [2, 4, 5], [3, 5, 8], [1, 3, 4], [0, 4, 7], [1, 3, 4, 7]])
    changes = {
        "aux_layer_ids": ids, "num_aux_layers": len(ids), "rope": r.choice(ROPES),
        "num_key_value_heads": r.choice([1, 2, 4]), "head_dim": r.choice([8, 16]),
        "draft_vocab_size": r.choice([16, 16, 64]), "rms_norm_eps": r.choice([1e-6, 1e-5]),
        "norms": NormSwitches(**{s: r.random() < 0.25 for s in NormSwitches.model_fields}),
    }  # fmt: skip
    if r.random() < 0.25:
        changes |= {"form": "mla", "mla": MLA, "num_key_value_heads": 4, "rope": r.choice(ROPES[:2])}
    elif r.random() < 0.3:
        changes |= {"attention_bias": True}
    if r.random() < 0.3:
        changes |= {"own_embedding": True, "target_hidden_size": r.choice([32, 48])}
    source = drafter(contract=r.random() < 0.7, signed=r.random() < 0.5, **changes)
    dtype = r.choice([torch.bfloat16, torch.float16, torch.float32])
    source.tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in source.tensors.items()}
    return source


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 60))])
def test_a_conversion_keeps_the_outputs_or_is_refused(tmp_path, seed):
    source = draw(seed)
    before, kept = outputs(source), 0
    for first, second in itertools.permutations(DIALECTS, 2):
        a, b = tmp_path / f"{first}-{second}-a", tmp_path / f"{first}-{second}-b"
        try:
            others.write(first, source, a)
            read = foreign.read(a)
            assert torch.equal(outputs(read), before), f"{first} reads back as another drafter"
            convert_folder(a, b, second)
        except UserError as e:
            assert not b.exists() and (e.what or e.why)
            continue
        assert torch.equal(outputs(foreign.read(b)), before), f"{first} → {second} changed what is computed"
        kept += 1
    assert kept or source.contract is None or source.config.norms != NormSwitches() or source.config.form == "mla"


@pytest.mark.parametrize("name", VARIANTS)
def test_a_public_variant_computes_the_same_after_conversion(tmp_path, name):
    assert len(VARIANTS) >= 20
    dialect, change = VARIANTS[name]
    source = drafter()
    others.write(dialect, source, tmp_path / "a")
    vary(tmp_path / "a", **change)
    convert_folder(tmp_path / "a", tmp_path / "b", "vllm")
    assert torch.equal(outputs(foreign.read(tmp_path / "b")), outputs(source))


def test_the_outputs_see_what_they_must():
    """A shifted id, another rope, a switch or a shifted map gives other figures: the comparison above can fail."""
    source = drafter()
    before = outputs(source)
    for changes in (
        {"aux_layer_ids": [3, 5, 6]},
        {"rope": ROPES[3]},
        {"norms": NormSwitches(norm_before_residual=True)},
        {"norms": NormSwitches(norm_output=True)},
    ):
        assert not torch.equal(outputs(drafter(**changes)), before)
    source.tensors["d2t"] = source.tensors["d2t"] + 1
    assert not torch.equal(outputs(source), before)


@pytest.mark.parametrize("stale", [False, True])
def test_a_table_equal_to_the_targets_is_left_out_and_another_kept(tmp_path, tiny_target, stale):
    table = read_embedding(tiny_target)
    V, H = table.shape
    source = drafter(hidden_size=H, target_hidden_size=H, vocab_size=V, own_embedding=True)
    source.tensors["embed_tokens.weight"] = (table + 0.1 if stale else table.clone()).to(torch.bfloat16)
    if not stale:
        source.tensors["embed_tokens.weight"] = table.clone()
        source.tensors = {n: t.float() if t.is_floating_point() else t for n, t in source.tensors.items()}
    before = outputs(source)
    others.write("vllm", source, tmp_path / "a")
    result = convert_folder(tmp_path / "a", tmp_path / "b", "sglang", target=tiny_target)
    after = foreign.read(tmp_path / "b")
    assert ("embed_tokens.weight" in after.tensors) is stale
    assert any("kept embed_tokens" in n if stale else "left out embed_tokens" in n for n in result["notes"])
    assert torch.equal(outputs(after, table.float()), before)
