"""States through a real vLLM on the CPU agree with transformers per layer, prefill and generated alike, in chunks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from extract_support import agree

from draftsmith.contract import Contract
from draftsmith.engine.find import Engine
from draftsmith.engine.server import Server
from draftsmith.extract.rows import Item
from draftsmith.extract.transformers_backend import TransformersStates
from draftsmith.extract.vllm_backend import VllmBackend
from draftsmith.extract.wire import Wire
from draftsmith.target.config import target_facts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
AUX = [1, 3, 6]
"""6 = after the last layer of the tiny targets: also taken as an aux stream."""


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.ci), "qwen3", "deepseek_v3"])
def test_states_through_vllm_agree_with_transformers(
    tmp_path: Path, build_target: Callable[..., Path], real_engine: Engine, kind: str
) -> None:
    target = build_target(tmp_path / kind, kind)
    contract = Contract(target=target_facts(target), aux_layer_ids=AUX, final_state="pre_norm")
    model = TransformersStates(target, AUX)
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 90, (n,), generator=g).tolist() for n in (150, 40, 9, 77)]
    # 64 tokens a step: the long rows are prefilled in chunks, several requests share a step
    args = ["--skip-tokenizer-init", "--max-num-batched-tokens", "64", "--max-num-seqs", "8"]
    with Wire(contract, tmp_path) as wire:
        env = wire.environment()
        with Server(
            real_engine,
            target,
            log=tmp_path / "engine.log",
            dtype="float32",
            max_model_len=200,
            args=[*args, *wire.arguments()],
            env=env,
        ) as server:
            backend = VllmBackend(server, wire, target, contract.target.hidden_size, None, 0)
            items = [Item(f"r{i}", np.asarray(r, dtype=np.int32), 4) for i, r in enumerate(rows)]
            for (_, made), ids in zip(backend.stream([i] for i in items), rows, strict=True):
                agree(made[0], model, ids, AUX)
            prompt, (name, fields) = rows[1], wire.ask(None)
            body: dict[str, Any] = {"model": server.name, "prompt": prompt, "max_tokens": 20, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True, **fields}
            answer = httpx.post(server.url + "/v1/completions", json=body, timeout=300)
            ids = prompt + json.loads(answer.text)["choices"][0]["token_ids"]
            assert len(ids) == 60
            agree(wire.take(name, ids, len(prompt), server.require_alive), model, ids, AUX)
            backend.close()
