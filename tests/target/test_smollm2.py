"""The demo's target, made from a public package: it speaks sense, and its ids are the original's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftsmith.target.config import target_facts
from draftsmith.target.smollm2 import unpermute
from draftsmith.target.tokenizer import TargetTokenizer, stop_ids
from draftsmith.target.weights import read_embedding, read_final_norm, read_lm_head


def test_unpermute_turns_rotary_pairs_into_halves() -> None:
    pairs = np.array([[0], [2], [1], [3], [10], [12], [11], [13]])  # two heads of four rows, as pairs
    assert unpermute(pairs, 2).ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_digits_specials_and_template(smollm2_target: Path) -> None:
    tok = TargetTokenizer.load(smollm2_target)
    words = tok.inner.convert_ids_to_tokens(tok.encode("In 2024<|im_end|>"))
    assert words == ["In", "Ġ", "2", "0", "2", "4", "<|im_end|>"]
    assert (tok.inner.bos_token_id, tok.inner.eos_token_id, tok.inner.pad_token_id) == (1, 2, 2)
    assert stop_ids(smollm2_target) == tok.end_of_turn_ids == [2]
    assert tok.special_ids[:3] == [0, 1, 2]
    assert len(tok.special_ids) == 17
    text = tok.decode(tok.render([{"role": "user", "content": "Hé 你好 🎉"}]))
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHé 你好 🎉<|im_end|>\n<|im_start|>assistant\n")


def test_facts_and_needed_weights(smollm2_target: Path) -> None:
    facts = target_facts(smollm2_target)
    assert (facts.architecture, facts.hidden_size, facts.num_layers, facts.vocab_size) == (
        "LlamaForCausalLM",
        576,
        30,
        49152,
    )
    assert read_embedding(smollm2_target, rows=[1, 2]).shape == (2, 576)
    assert (read_lm_head(smollm2_target, rows=[7]) == read_embedding(smollm2_target, rows=[7])).all()
    assert read_final_norm(smollm2_target).shape == (576,)


@pytest.mark.slow
def test_it_knows_the_capital_of_france(smollm2_target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tok = TargetTokenizer.load(smollm2_target)
    model = AutoModelForCausalLM.from_pretrained(smollm2_target, dtype=torch.bfloat16)
    ids = tok.render([{"role": "user", "content": "What is the capital of France?"}])
    out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert tok.decode(out) == "The capital of France is Paris.<|im_end|>"
