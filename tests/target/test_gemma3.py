"""gemma-3's way back from GGUF, on a file of a few kilobytes made here: weights, config and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith.errors import UserError
from draftsmith.target.gemma3 import convert_gguf, merges_of

H, I, HEADS, KV, D, LAYERS = 32, 64, 2, 1, 16, 6  # noqa: E741 (the model's own letters)
CONTROLS = ["<pad>", "<eos>", "<bos>"]
BYTES = [f"<0x{n:02X}>" for n in range(256)]
PIECES = {"▁": -1.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "abc": -5.0, "▁ab": -3.0, "bc": -4.0}


def write_gguf(path: Path, **changes: Any) -> list[str]:
    from gguf import GGUFWriter

    rng = np.random.default_rng(0)
    tokens = [*CONTROLS, "<unk>", *BYTES, "\n\n", *PIECES]
    kinds = [3, 3, 3, 2, *[6] * 256, 4, *[1] * len(PIECES)]
    scores = [-1000.0] * (len(tokens) - len(PIECES)) + list(PIECES.values())
    w = GGUFWriter(str(path), "gemma3")
    w.add_context_length(512)
    w.add_embedding_length(H)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(I)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV)
    w.add_key_length(D)
    w.add_value_length(D)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e6)
    w.add_sliding_window(32)
    w.add_tokenizer_model(changes.get("tokenizer", "llama"))
    w.add_token_list(tokens)
    w.add_token_scores(scores)
    w.add_token_types(kinds)
    for name, i in (("bos", 2), ("eos", 1), ("unk", 3), ("pad", 0)):
        getattr(w, f"add_{name}_token_id")(i)
    shapes = {"token_embd": (len(tokens), H), "output_norm": (H,)}
    for i in range(LAYERS):
        b = f"blk.{i}."
        shapes |= {b + n: (H,) for n in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")}
        shapes |= {
            b + "attn_q_norm": (D,),
            b + "attn_k_norm": (D,),
            b + "attn_q": (HEADS * D, H),
            b + "attn_k": (KV * D, H),
        }
        shapes |= {b + "attn_v": (KV * D, H), b + "attn_output": (H, HEADS * D)}
        shapes |= {b + "ffn_gate": (I, H), b + "ffn_up": (I, H), b + "ffn_down": (H, I)}
    for name, shape in shapes.items():
        value = (
            np.full(shape, 1.5, np.float32) if name.endswith("norm") else rng.normal(0, 0.1, shape).astype(np.float32)
        )
        w.add_tensor(name + ".weight", value)
    if "extra" in changes:
        w.add_tensor(changes["extra"], np.ones(4, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return tokens


def test_a_folder_that_transformers_runs(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = write_gguf(tmp_path / "m.gguf")
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "gemma")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "Gemma3ForCausalLM" and model.config.num_hidden_layers == LAYERS
    assert model.config.layer_types[4:] == ["sliding_attention", "full_attention"]
    assert model.config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert model.config.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0
    assert torch.all(model.model.norm.weight == 0.5)  # Gemma multiplies by 1 + weight
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    tok = AutoTokenizer.from_pretrained(folder)
    ids = tok.encode("abc ab\n\né")
    assert [tokens[i] for i in ids] == ["<bos>", "abc", "▁ab", "\n\n", "<0xC3>", "<0xA9>"]
    assert tok.decode(ids, skip_special_tokens=True) == "abc ab\n\né"
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), len(tokens))


def test_merges_come_by_score() -> None:
    words, scores = list(PIECES), list(PIECES.values())
    assert merges_of(words, scores, [True] * len(words)) == [
        ("a", "b"), ("▁", "ab"), ("b", "c"), ("a", "bc"), ("ab", "c")
    ]  # fmt: skip
    assert merges_of(words, scores, [w != "ab" for w in words]) == [("b", "c"), ("a", "bc")]


@pytest.mark.parametrize(
    ("changes", "words"), [({"tokenizer": "gpt2"}, "'gpt2' tokenizer"), ({"extra": "odd.weight"}, "odd.weight")]
)
def test_another_form_is_refused_and_leaves_nothing(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(UserError, match=words):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "gemma")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
