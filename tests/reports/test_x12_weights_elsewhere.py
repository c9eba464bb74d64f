"""X12: the target's weights are not where one expects (speculators#184, #1156, ModelOpt#1566, #1417, #1052, SpecForge#666).

Exact keys first; a suffix counts only if it is unique; otherwise the candidates are listed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.errors import UserError
from draftsmith.target.weights import layer_weights, read_embedding, read_final_norm, read_lm_head

V, G = 32, 8
EMBED, NORM, HEAD, LAYER = (torch.arange(V * G).reshape(V, G) + 0.0, torch.ones(G), torch.ones(V, G), torch.eye(G))


def write(path: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors", **config: object) -> Path:
    path.mkdir(exist_ok=True)
    save_file({k: v.clone() for k, v in tensors.items()}, path / name)
    base = {
        "model_type": "llama",
        "hidden_size": G,
        "num_hidden_layers": 2,
        "vocab_size": V,
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(base | config))
    return path


# (embedding, final norm, lm_head, prefix of layer 0) as published checkpoints name them
SPELLINGS = [
    ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.0."),
    ("language_model.model.embed_tokens.weight", "language_model.model.norm.weight", "language_model.lm_head.weight",
     "language_model.model.layers.0."),  # Kimi-K2.5 (ModelOpt#1052)
    ("model.language_model.embed_tokens.weight", "model.language_model.norm.weight", "lm_head.weight",
     "model.language_model.layers.0."),  # Qwen3-VL, Gemma-3 (SpecForge#666)
    ("model.language_model.model.embed_tokens.weight", "model.language_model.model.norm.weight",
     "model.language_model.lm_head.weight", "model.language_model.model.layers.0."),
    ("tok_embeddings.weight", "norm.weight", "output.weight", "layers.0."),  # consolidated (ModelOpt#1417)
    ("backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight", "backbone.layers.0."),  # speculators#1156
    ("thinker.model.embed_tokens.weight", "thinker.model.norm.weight", "thinker.lm_head.weight", "thinker.model.layers.0."),
    ("transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight", "transformer.h.0."),
    ("embed.weight", "norm.weight", "head.weight", "layers.0."),  # DeepSeek's own files
]  # fmt: skip


@pytest.mark.parametrize("names", SPELLINGS, ids=[s[0] for s in SPELLINGS])
def test_every_published_spelling_is_found(tmp_path: Path, names: tuple[str, str, str, str]) -> None:
    embed, norm, head, layer = names
    tensors = {embed: EMBED, norm: NORM, head: HEAD, layer + "self_attn.q_proj.weight": LAYER}
    f = write(tmp_path / "t", tensors)
    assert torch.equal(read_embedding(f, [3]), EMBED[[3]])
    assert torch.equal(read_lm_head(f), HEAD)
    assert torch.equal(read_final_norm(f), NORM)
    assert torch.equal(layer_weights(f, 0)["self_attn.q_proj.weight"], LAYER)


def test_the_multi_token_layers_second_embedding_is_not_taken(tmp_path: Path) -> None:
    extra = {
        "model.layers.61.embed_tokens.weight": -EMBED,
        "model.layers.61.shared_head.norm.weight": -NORM,
        "model.layers.61.shared_head.head.weight": -HEAD,
    }
    plain = {"model.embed_tokens.weight": EMBED, "model.norm.weight": NORM, "lm_head.weight": HEAD}
    f = write(tmp_path / "t", plain | extra)
    assert torch.equal(read_embedding(f), EMBED)
    assert torch.equal(read_lm_head(f), HEAD)
    assert torch.equal(read_final_norm(f), NORM)


def test_a_new_prefix_counts_if_it_is_the_only_one(tmp_path: Path) -> None:
    f = write(tmp_path / "a", {"core.text.embed_tokens.weight": EMBED, "core.layers.0.embed_tokens.weight": -EMBED})
    assert torch.equal(read_embedding(f), EMBED)
    g = write(tmp_path / "b", {"core.a.embed_tokens.weight": EMBED, "core.b.embed_tokens.weight": -EMBED})
    with pytest.raises(UserError) as e:
        read_embedding(g)
    assert "core.a.embed_tokens.weight" in e.value.what
    assert "core.b.embed_tokens.weight" in e.value.what


def test_with_index_without_index_and_consolidated(tmp_path: Path) -> None:
    plain = {"model.embed_tokens.weight": EMBED, "model.norm.weight": NORM}
    f = write(tmp_path / "index", plain, "model-00001-of-00002.safetensors")
    save_file({"lm_head.weight": HEAD}, f / "model-00002-of-00002.safetensors")
    save_file({"lm_head.weight": -HEAD}, f / "stale.safetensors")
    weight_map = dict.fromkeys(plain, "model-00001-of-00002.safetensors")
    weight_map["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (f / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(read_lm_head(f), HEAD)
    (f / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"1 of 2 weight files are missing.*00002-of-00002"):
        read_lm_head(f)
    g = write(tmp_path / "parts", plain, "a.safetensors")
    save_file({"lm_head.weight": HEAD}, g / "b.safetensors")
    assert torch.equal(read_lm_head(g), HEAD)
    h = write(
        tmp_path / "consolidated", {"tok_embeddings.weight": EMBED, "output.weight": HEAD}, "consolidated.safetensors"
    )
    assert torch.equal(read_lm_head(h), HEAD)


def test_untied_without_a_head_is_said(tmp_path: Path) -> None:
    f = write(tmp_path / "t", {"model.embed_tokens.weight": EMBED, "model.norm.weight": NORM})
    with pytest.raises(UserError, match=r"config\.json says tie_word_embeddings false"):
        read_lm_head(f)
