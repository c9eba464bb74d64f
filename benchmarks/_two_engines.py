"""Two servers of one engine side by side, one plain and one with our states plugin, measured in turns.

Both stay up during the whole measurement and only one is asked at a time, so that whatever else the machine does falls
on both sides alike.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from draftsmith.contract import Contract
from draftsmith.engine.find import Engine
from draftsmith.engine.process import free_port
from draftsmith.engine.server import Server
from draftsmith.extract.wire import Wire
from draftsmith.target.config import default_aux_layers, target_facts


@dataclass(frozen=True)
class Pair:
    """plain, tapped: running servers; wire: where the tapped one hands over its states."""

    plain: Server
    tapped: Server
    wire: Wire
    contract: Contract
    work: Path


@contextmanager
def both(engine: Engine, target: Path, max_model_len: int, dtype: str) -> Iterator[Pair]:
    facts = target_facts(target)
    contract = Contract(target=facts, aux_layer_ids=default_aux_layers(facts.num_layers), final_state="pre_norm")
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wire = stack.enter_context(Wire(contract, work))
        given: dict[str, Any] = {"max_model_len": max_model_len, "dtype": dtype}
        ports = [free_port()]
        while len(ports) < 2:  # two servers that look at the same time would find the same one
            ports += {free_port()} - set(ports)
        plain = Server(engine, target, log=work / "plain.log", port=ports[0], **given)
        tapped = Server(
            engine,
            target,
            log=work / "tapped.log",
            port=ports[1],
            args=wire.arguments(),
            env=wire.environment(),
            **given,
        )
        with ThreadPoolExecutor(2) as pool:  # started together
            list(pool.map(stack.enter_context, (plain, tapped)))
        print(f"ready after {plain.ready_seconds} and {tapped.ready_seconds} s", file=sys.stderr, flush=True)
        yield Pair(plain, tapped, wire, contract, work)


def lengths(count: int, low: int, high: int, seed: int = 0) -> list[int]:
    r = random.Random(seed)
    return [r.randint(low, high) for _ in range(count)]


def random_rows(sizes: list[int], vocab: int, seed: int = 0) -> list[list[int]]:
    r = random.Random(seed)
    return [[r.randrange(3, vocab - 1) for _ in range(n)] for n in sizes]


def ask_all(server: Server, bodies: list[dict[str, Any]], at_once: int) -> list[dict[str, Any]]:
    """Answers of /v1/completions to all bodies, `at_once` in flight, in order."""
    with httpx.Client(timeout=600, limits=httpx.Limits(max_connections=at_once)) as http:

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            answer = http.post(server.url + "/v1/completions", json={"model": server.name, **body})
            answer.raise_for_status()
            return dict(answer.json()["choices"][0])

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(ask, bodies))


def in_turns(rounds: int, sides: dict[str, Callable[[], int]]) -> dict[str, list[float]]:
    """Tokens per second of each side, one measurement a round, sides in turns (the order changes every round)."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for n in range(rounds):
        order = list(sides) if n % 2 == 0 else list(sides)[::-1]
        for name in order:
            started = time.perf_counter()
            tokens = sides[name]()
            found[name].append(round(tokens / (time.perf_counter() - started), 1))
            print(f"round {n + 1}: {name}: {found[name][-1]:,.1f} tokens/s", file=sys.stderr, flush=True)
    return found


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
