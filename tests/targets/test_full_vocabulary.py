"""A drafter of the target's whole vocabulary: the engine has no place for a map, so none is written, and it reads back."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from draftsmith.dialects import vllm
from draftsmith.dialects.checkpoint import Checkpoint
from draftsmith.dialects.foreign import read
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter


def test_no_map_is_written_and_the_identity_comes_back(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "target_hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
             "head_dim": 16, "intermediate_size": 32, "vocab_size": 64, "aux_layer_ids": [1, 2, 3]}  # fmt: skip
    for size, written in ((64, False), (32, True)):
        model = Drafter(DrafterConfig.model_validate(sizes | {"draft_vocab_size": size}))
        folder = tmp_path / f"d{size}-eagle3"
        vllm.write(Checkpoint(model.config, dict(model.state_dict())), folder, dtype="float32")
        with safe_open(folder / "model.safetensors", "pt") as f:
            assert ("d2t" in f.keys()) is written and ("t2d" in f.keys()) is written  # noqa: SIM118
        back = read(folder)
        assert torch.equal(back.tensors["d2t"], model.d2t) and torch.equal(back.tensors["t2d"], model.t2d)
        assert all(torch.equal(back.tensors[n], p) for n, p in model.named_parameters())
