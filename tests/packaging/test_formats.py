"""Old files stay readable: files as format 0 and 1 had them are read, and a step carries the oldest to a new format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith import contract as contracts
from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.extract import store as stores
from draftsmith.extract.store import StateStore
from draftsmith.formats import upgrade
from draftsmith.record import sha256_file

# As they lay on a disk; never to be changed, only added to.
CONTRACT_1: dict[str, Any] = {
    "format": 1,
    "target": {
        "name": "t", "revision": None, "config_hash": "0" * 64, "architecture": "LlamaForCausalLM", "model_type": "llama",
        "outer_model_type": "llama", "hidden_size": 2, "num_layers": 8, "vocab_size": 16,
    },
    "tokenizer_hash": None, "chat_template_hash": None, "thinking": None, "data_hash": None, "draft_vocab_size": None,
    "vocab_map_hash": None, "aux_layer_ids": [2, 4, 5], "final_state": "pre_norm", "norms": None, "rope": None,
    "sizes": None, "trained_length": None, "ttt_steps": None,
}  # fmt: skip
STORE_1: dict[str, Any] = {"format": 1, "codec": "bf16", "params": {}, "aux_layer_ids": [2, 4, 5], "hidden_size": 2}


def old(raw: dict[str, Any], *gone: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k not in gone}


def write_store(folder: Path, facts: dict[str, Any], contract: dict[str, Any]) -> Path:
    """A store of one row of three tokens, as its shards are laid out."""
    folder.mkdir()
    (folder / "store.json").write_text(json.dumps(facts))
    (folder / "contract.json").write_text(json.dumps(contract))
    parts = {
        "0.token_ids": ("I32", [3], np.arange(3, dtype="<i4").tobytes()),
        "0.aux": ("BF16", [3, 3, 2], b"\x80\x3f" * 18),
        "0.final": ("BF16", [3, 2], b"\x80\x3f" * 6),
    }
    header, at = {}, 0
    for name, (dtype, shape, raw) in parts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    path = folder / "shard-00000.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(raw for _, _, raw in parts.values()))
    row = {
        "row_id": "row", "shard": "shard-00000", "number": 0, "tokens": 3, "boundary": 1, "final_start": 0, "argmax": False,
        "bytes": 60, "answer": False,
    }  # fmt: skip
    index = {"sha256": sha256_file(path), "bytes": path.stat().st_size, "rows": [row]}
    (folder / "shard-00000.json").write_text(json.dumps(index))
    return folder


def test_the_formats_of_today_have_a_step_from_each_before() -> None:
    for module in (contracts, stores):
        assert sorted(module.STEPS) == list(range(module.FORMAT)), f"{module.__name__} cannot read one of its formats"


@pytest.mark.parametrize("raw", [CONTRACT_1, old(CONTRACT_1, "format")], ids=["1", "0"])
def test_an_old_contract_is_read(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "contract.json").write_text(json.dumps(raw))
    found = Contract.load(tmp_path)
    assert found.format == contracts.FORMAT and found.target.num_layers == 8 and found.aux_layer_ids == [2, 4, 5]


@pytest.mark.parametrize("facts", [STORE_1, old(STORE_1, "format", "params")], ids=["1", "0"])
def test_an_old_store_is_read(facts: dict[str, Any], tmp_path: Path) -> None:
    store = StateStore.open(write_store(tmp_path / "store", facts, CONTRACT_1))
    assert store.verify() == []
    states = store.read("row")
    assert states.token_ids.tolist() == [0, 1, 2] and float(states.aux.float().mean()) == 1.0


def test_a_change_of_meaning_is_carried_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the next release would do it: format 2 says `eager` where 1 said nothing."""

    def step(raw: dict[str, Any]) -> dict[str, Any]:
        return raw | {"thinking": raw["thinking"] or "off"}

    monkeypatch.setattr(contracts, "FORMAT", 2)
    monkeypatch.setattr(contracts, "STEPS", contracts.STEPS | {1: step})
    for raw in (CONTRACT_1, old(CONTRACT_1, "format")):
        (tmp_path / "contract.json").write_text(json.dumps(raw))
        found = Contract.load(tmp_path)
        assert (found.format, found.thinking) == (2, "off")
    found.save(tmp_path)
    assert json.loads((tmp_path / "contract.json").read_text())["format"] == 2
    monkeypatch.undo()
    with pytest.raises(UserError, match="knows up to 1"):
        Contract.load(tmp_path)


@pytest.mark.parametrize("number", [99, -1, "1", True, None])
def test_a_format_that_is_not_known_is_refused(number: Any) -> None:
    with pytest.raises(UserError):
        upgrade({"format": number}, 1, {0: dict}, Path("x.json"), "test")
    with pytest.raises(UserError, match="nothing leads"):
        upgrade({"format": 0}, 2, {1: dict}, Path("x.json"), "test")
