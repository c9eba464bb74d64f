"""Targets of every shape, read by their headers alone: wrappers, quantised heads, hybrids, a table of many gigabytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.target.describe import describe
from draftsmith.target.weights import read_embedding, read_lm_head

KIMI = "language_model.model."


def sparse(path: Path, tensors: dict[str, tuple[str, list[int]]], rows: dict[str, dict[int, bytes]]) -> None:
    """A safetensors file of any size that takes no room: only the given rows are written."""
    width = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = width[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        f.truncate(8 + len(raw) + at)
        for name, some in rows.items():
            per_row = (header[name]["data_offsets"][1] - header[name]["data_offsets"][0]) // tensors[name][1][0]
            for row, data in some.items():
                f.seek(8 + len(raw) + header[name]["data_offsets"][0] + row * per_row)
                f.write(data)


def kimi(path: Path, **config: Any) -> Path:
    """Kimi-K2.5's shape and names; a file of 4.7 GB that takes some kilobytes."""
    path.mkdir()
    text = {"model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840}
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (path / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": False} | config))
    row = torch.full((7168,), 1.5, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    sparse(
        path / "model.safetensors",
        {
            KIMI + "embed_tokens.weight": ("BF16", [163840, 7168]),
            KIMI + "norm.weight": ("BF16", [7168]),
            KIMI + "layers.60.self_attn.o_proj.weight": ("F8_E4M3", [7168, 8192]),
            "language_model.lm_head.weight": ("BF16", [163840, 7168]),
        },
        {"language_model.lm_head.weight": {163839: row}, KIMI + "embed_tokens.weight": {7: row}},
    )
    return path


def test_a_few_rows_of_a_table_of_gigabytes(tmp_path: Path) -> None:
    folder = kimi(tmp_path / "k")
    assert (folder / "model.safetensors").stat().st_size > 4.7e9
    head = read_lm_head(folder, [163839, 5])
    assert head[0].eq(1.5).all()
    assert head[1].eq(0).all()
    assert read_embedding(folder, [7]).eq(1.5).all()


def test_a_wrapped_quantised_target_is_described(tmp_path: Path) -> None:
    quant = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}
    found = describe(kimi(tmp_path / "k", **quant))
    assert (found["model_type"], found["outer_model_type"]) == ("kimi_k2", "kimi_k25")
    assert found["quantisation"] == "compressed-tensors/pack-quantized"
    assert found["default_aux_layers"] == [2, 30, 58]
    assert found["weights"]["embedding"] == {
        "key": KIMI + "embed_tokens.weight",
        "stored": "BF16",
        "shape": [163840, 7168],
    }
    assert found["weights"]["lm_head"]["key"] == "language_model.lm_head.weight"
    assert found["weights"]["last_layer"] == KIMI + "layers.60."


def test_hybrids_shallow_ones_and_missing_weights_are_said(tmp_path: Path) -> None:
    config = {
        "architectures": ["X"],
        "model_type": "llama",
        "hidden_size": 8,
        "num_hidden_layers": 6,
        "vocab_size": 9,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"] * 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = describe(tmp_path)
    assert found["layers"] == {"full_attention": 4, "sliding_attention": 2}
    assert found["default_aux_layers"] is None
    assert "6 layers" in found["aux_note"]
    assert "no safetensors" in found["weights"]["why"]


def test_the_command_prints_json_and_lines(tiny_target: Path) -> None:
    runner = CliRunner()
    as_json = runner.invoke(app, ["target", str(tiny_target), "--json"])
    assert as_json.exit_code == 0
    facts = json.loads(as_json.stdout)
    assert (facts["hidden_size"], facts["num_layers"], facts["vocab_size"]) == (64, 8, 320)
    assert facts["weights"]["lm_head"]["key"] == "lm_head.weight"
    lines = runner.invoke(app, ["target", str(tiny_target)])
    assert "hidden_size: 64" in lines.stdout
    assert "stop_ids: [0, 2]" in lines.stdout


@pytest.mark.parametrize("tie", [True, False])
def test_tied_heads_are_named_so(tmp_path: Path, tie: bool) -> None:
    found = describe(kimi(tmp_path / "k", tie_word_embeddings=tie))
    assert (found["weights"]["lm_head"] == "the embedding (tied)") is tie
