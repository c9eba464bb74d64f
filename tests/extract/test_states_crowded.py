"""One pass in a real vLLM that is short of room: requests are thrown out and begun again, and clients leave."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from extract_support import agree

from draftsmith.contract import Contract
from draftsmith.engine.find import Engine
from draftsmith.engine.metrics import read_counters
from draftsmith.engine.server import Server
from draftsmith.extract import scratch
from draftsmith.extract.transformers_backend import TransformersStates
from draftsmith.extract.wire import Wire
from draftsmith.target.config import target_facts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
AUX = [1, 3, 5]
REQUESTS, ANSWER = 16, 180


def test_states_of_preempted_answers_are_right_and_left_ones_leave_nothing(
    tmp_path: Path, build_target: Callable[..., Path], real_engine: Engine
) -> None:
    target = build_target(tmp_path / "llama", "llama")
    contract = Contract(target=target_facts(target), aux_layer_ids=AUX, final_state="pre_norm")
    model = TransformersStates(target, AUX)
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 90, (20 + 3 * i,), generator=g).tolist() for i in range(REQUESTS)]
    # room for 384 tokens, where any two of them want more: however slowly they arrive, some are thrown out
    args = ["--skip-tokenizer-init", "--max-num-batched-tokens", "64", "--max-num-seqs", str(REQUESTS)]
    args += ["--block-size", "32", "--num-gpu-blocks-override", "12"]
    with (
        Wire(contract, tmp_path) as wire,
        Server(
            real_engine,
            target,
            log=tmp_path / "engine.log",
            dtype="float32",
            max_model_len=256,
            args=[*args, *wire.arguments()],
            env=wire.environment(),
        ) as server,
    ):
        left: list[str] = []

        def ask(i: int) -> tuple[str, list[int]] | None:
            name, fields = wire.ask(None)
            body: dict[str, Any] = {"model": server.name, "prompt": prompts[i], "max_tokens": ANSWER, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True, **fields}
            url = server.url + "/v1/completions"
            if i % 4 == 3:  # a client that leaves after some tokens
                with httpx.stream("POST", url, json=body | {"stream": True}, timeout=300) as coming:
                    lines = coming.iter_lines()
                    for _ in range(12):
                        next(lines)
                left.append(name)
                return None
            answer = httpx.post(url, json=body, timeout=300)
            return name, prompts[i] + answer.json()["choices"][0]["token_ids"]

        with ThreadPoolExecutor(REQUESTS) as pool:
            answers = list(pool.map(ask, range(REQUESTS)))
        preempted = read_counters(httpx.get(server.url + "/metrics").text).preemptions
        assert preempted > 0 and len(left) == REQUESTS // 4
        for answer, prompt in zip(answers, prompts, strict=True):
            if answer is None:
                continue
            name, ids = answer
            assert len(ids) == len(prompt) + ANSWER
            agree(wire.take(name, ids, len(prompt), server.require_alive), model, ids, AUX)
        # Files of those that left come when the engine learns of it, and go with the next look for such.
        until, swept = time.monotonic() + 30, 0
        while swept < len(left) and time.monotonic() < until:
            swept += wire.sweep(set())
            time.sleep(0.1)
        assert swept == len(left)
        assert [p.name for p in wire.folder.iterdir()] == [scratch.OWNER]
