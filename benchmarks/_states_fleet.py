"""Servers that give states, side by side, and how each is asked (extract_gpu.py)."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from _two_engines import middle

from draftsmith.contract import Contract, TargetFacts
from draftsmith.engine.find import Engine
from draftsmith.engine.process import free_port
from draftsmith.engine.server import Server
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.one_pass import Keeper
from draftsmith.extract.packing import packed
from draftsmith.extract.post import Poster
from draftsmith.extract.rows import Item, batches
from draftsmith.extract.self_check import relative_l2
from draftsmith.extract.states import States
from draftsmith.extract.store import StateWriter
from draftsmith.extract.vllm_backend import REQUESTS, VllmBackend
from draftsmith.extract.wire import Wire

BATCH_TOKENS = 8192
_TOKENIZER = ("tokenizer", "special_tokens", "vocab", "merges", "added_tokens", "chat_template")


def write_shape(config: dict[str, Any], tokenizer: Path, folder: Path) -> Path:
    """A target's folder without weights: `config`, and the tokenizer of another."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for path in tokenizer.iterdir():
        if path.name.startswith(_TOKENIZER):
            shutil.copyfile(path, folder / path.name)
    return folder


@dataclass(frozen=True)
class Limits:
    max_model_len: int
    dtype: str
    args: list[str]


LAST_ROW = "until the last row is in the store"
LAST_ANSWER = "until the last answer"


@dataclass(frozen=True)
class Done:
    """One turn of a side: the tokens that count and its seconds, and the seconds after which certain things had come."""

    tokens: int
    seconds: float
    marks: dict[str, float] = field(default_factory=dict)


class Asker:
    """One running server of a target. wire: where a tapped one hands over its states."""

    def __init__(self, server: Server, contract: Contract, wire: Wire | None) -> None:
        self.server, self.contract, self.wire = server, contract, wire
        self.http = Poster(server.url)

    def post(self, **body: Any) -> dict[str, Any]:
        status, answer = self.http.post("/v1/completions", {"model": self.server.name, **body})
        if status != 200:
            raise RuntimeError(f"{status}: {answer[:500]!r}")
        return dict(json.loads(answer))

    def _stream(self, rows: Sequence[Sequence[int]], target: Path, argmax: bool) -> Any:
        assert self.wire is not None
        self.wire.argmax = argmax
        items = [Item(f"r{i}", np.asarray(r, dtype=np.int32), len(r) // 2) for i, r in enumerate(rows)]
        backend = VllmBackend(self.server, self.wire, target, self.contract.target.hidden_size, None, 0)
        try:
            yield from backend.stream(batches(items, BATCH_TOKENS))
        finally:
            backend.close()

    def hand_over(self, rows: Sequence[Sequence[int]]) -> int:
        """Tensors of all rows in this process, their ids compared."""
        return sum(s.tokens for _, made in self._stream(rows, Path(), False) for s in made)

    def store(self, rows: Sequence[Sequence[int]], folder: Path, argmax: bool = False) -> Done:
        """As the extract stage does it: checked, packed and stored, bf16; the last shard summed and closed."""
        folder, tokens, started = fresh(folder), 0, time.perf_counter()
        with StateWriter(folder, self.contract, make_codec("bf16")) as writer:
            for batch, found in packed(self._stream(rows, Path(), argmax), writer):
                for _, row in found:
                    assert row is not None
                    writer.put(row)
                tokens += sum(i.tokens for i in batch)
            last_row = time.perf_counter() - started
        return Done(tokens, time.perf_counter() - started, {LAST_ROW: last_row})


def fresh(folder: Path) -> Path:
    """Before the clock starts: freeing gigabytes of the last turn is no part of this one."""
    shutil.rmtree(folder / "states", ignore_errors=True)
    return folder / "states"


class Fleet:
    """Starts servers together; one that fails is named and left out."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.stack = engine, ExitStack()
        self.pool = ThreadPoolExecutor(16)
        self.starting: dict[tuple[str, str], tuple[Future[Server], Server, Contract, Wire | None]] = {}
        self.ports: set[int] = set()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for future, *_rest in self.starting.values():
            future.cancel()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda entry: entry[1].stop(), self.starting.values()))
        wait_for([e[0] for e in self.starting.values()], timeout=30)
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.stack.close()

    def port(self) -> int:
        while (port := free_port()) in self.ports:
            pass
        self.ports.add(port)
        return port

    def add(
        self, target: str, folder: Path, contract: Contract, limits: Limits, work: Path, names: Sequence[str]
    ) -> None:
        """Begin starting the target's servers."""
        for name in names:
            args, env, wire = list(limits.args), {}, None
            if name.startswith("tapped"):
                wire = self.stack.enter_context(Wire(contract, work))
                args += wire.arguments()
                env = wire.environment() | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
                if name == "tapped":
                    del env["VLLM_USE_V2_MODEL_RUNNER"]  # what the engine itself would take
            if name == "example":
                layers = [*(contract.aux_layer_ids or []), contract.target.num_layers]
                shared = work / f"example-{target}"
                ram = Path("/dev/shm")
                if ram.is_dir() and shutil.disk_usage(ram).free > 8 << 30:
                    shared = ram / f"example-{os.getpid()}-{target}"
                self.stack.callback(shutil.rmtree, shared, ignore_errors=True)
                shared.mkdir(parents=True, exist_ok=True)
                args += ["--speculative-config", json.dumps(example_drafter(layers))]
                args += ["--kv-transfer-config", json.dumps(example_connector(shared))]
                env = {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # the newer runner has no such method before 0.30
            server = Server(
                self.engine,
                folder,
                log=work / f"{target}-{name}.log",
                port=self.port(),
                args=args,
                env=env,
                plugin=name.startswith("tapped"),
                max_model_len=limits.max_model_len,
                dtype=limits.dtype,
            )
            self.starting[target, name] = (self.pool.submit(server.start), server, contract, wire)

    def wait(self, seconds: float) -> None:
        wait_for([e[0] for e in self.starting.values()], timeout=max(seconds, 1))
        for (target, name), (future, server, *_rest) in self.starting.items():
            if not future.done():
                print(f"{target} {name}: not ready in time", flush=True)
            elif (e := future.exception()) is not None:
                print(f"{target} {name}: {e}", flush=True)
                tail = server.log.read_text(errors="replace").splitlines()[-25:] if server.log.is_file() else []
                print("\n".join(f"    {line[:300]}" for line in tail), flush=True)
            else:
                print(f"{target} {name}: ready in {server.ready_seconds} s", flush=True)

    def of(self, target: str) -> dict[str, Asker]:
        """The target's servers that stand."""
        return {
            name: Asker(server, contract, wire)
            for (of, name), (future, server, contract, wire) in self.starting.items()
            if of == target and future.done() and not future.cancelled() and future.exception() is None
        }

    def stop(self, target: str) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda k: self.starting[k][1].stop(), [k for k in self.starting if k[0] == target]))


def example_drafter(layers: list[int]) -> dict[str, Any]:
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }


def example_connector(shared: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(shared)},
    }


# what a side does once; returns the tokens that count


def spread(count: int, at_once: int, ask: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, range(count)))


def plain_prefill(plain: Asker, rows: Sequence[Sequence[int]]) -> int:
    spread(len(rows), REQUESTS, lambda i: plain.post(prompt=list(rows[i]), max_tokens=1, temperature=0))
    return sum(len(r) for r in rows)


def load_example(answer: dict[str, Any], ids: Sequence[int]) -> torch.Tensor:
    """The example's file as its own reader takes it (flock, load), ids compared, file and lock removed."""
    from safetensors.torch import load_file

    path = Path(answer["kv_transfer_params"]["hidden_states_path"])
    beside = path.with_name(path.name + ".lock")
    with beside.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        found = load_file(path)
    if found["token_ids"].tolist() != list(ids[: len(found["token_ids"])]):
        raise RuntimeError("the example's ids are not the row's")
    path.unlink()
    beside.unlink()
    return found["hidden_states"]


def example_rows(example: Asker, rows: Sequence[Sequence[int]]) -> int:
    def one(i: int) -> int:
        ids = list(rows[i])
        answer = example.post(prompt=ids, max_tokens=1, temperature=0, kv_transfer_params={})
        return load_example(answer, ids).shape[0]

    return sum(spread(len(rows), REQUESTS, one))


def _generate(asker: Asker, prompt: Sequence[int], n: int, **more: Any) -> dict[str, Any]:
    return asker.post(
        prompt=list(prompt), max_tokens=n, temperature=0.7, ignore_eos=True, return_token_ids=True, **more
    )


def answers(plain: Asker, prompts: Sequence[Sequence[int]], sizes: Sequence[int], at_once: int) -> int:
    found = spread(len(prompts), at_once, lambda i: _generate(plain, prompts[i], sizes[i]))
    return sum(len(a["choices"][0]["token_ids"]) for a in found)


def answers_kept(
    tapped: Asker, prompts: Sequence[Sequence[int]], sizes: Sequence[int], at_once: int, store: Path
) -> Done:
    """As one-pass capture does it: the keeper stores each row's states once the row is there."""
    assert tapped.wire is not None
    tapped.wire.argmax = True
    folder, started, marks = fresh(store), time.perf_counter(), {}
    with StateWriter(folder, tapped.contract, make_codec("bf16")) as writer:
        keeper = Keeper(tapped.wire, writer, tapped.server.require_alive, 1 << 20)
        try:

            def one(i: int) -> int:
                name, fields = keeper.ask()
                ids = _generate(tapped, prompts[i], sizes[i], **fields)["choices"][0]["token_ids"]
                row = SimpleNamespace(row_id=f"r{i}", token_ids=[*prompts[i], *ids], boundary=len(prompts[i]))
                keeper.keep(row, name)
                keeper.settled([row])
                return len(ids)

            tokens = sum(spread(len(prompts), at_once, one))
            marks[LAST_ANSWER] = time.perf_counter() - started
        finally:
            keeper.close()
        marks[LAST_ROW] = time.perf_counter() - started
    return Done(tokens, time.perf_counter() - started, marks)


def answers_handed_over(tapped: Asker, prompts: Sequence[Sequence[int]], sizes: Sequence[int], at_once: int) -> int:
    """Answers with their states as tensors in this process, ids compared; nothing is stored."""
    assert tapped.wire is not None
    wire, alive = tapped.wire, tapped.server.require_alive
    wire.argmax = False

    def one(i: int) -> int:
        name, fields = wire.ask(None)
        ids = _generate(tapped, prompts[i], sizes[i], **fields)["choices"][0]["token_ids"]
        wire.take(name, [*prompts[i], *ids], len(prompts[i]), alive)
        return len(ids)

    return sum(spread(len(prompts), at_once, one))


def answers_of_example(example: Asker, prompts: Sequence[Sequence[int]], sizes: Sequence[int], at_once: int) -> int:
    def one(i: int) -> int:
        answer = _generate(example, prompts[i], sizes[i], kv_transfer_params={"include_output_tokens": True})
        ids = answer["choices"][0]["token_ids"]
        load_example(answer, [*prompts[i], *ids])
        return len(ids)

    return sum(spread(len(prompts), at_once, one))


Side = Callable[[bool], int | Done]
"""True: the warming turn, of a few rows."""


def in_turns(
    sides: dict[str, Side],
    rounds: int,
    left: Callable[[], float],
    share: float,
    after: Callable[[dict[str, list[float]]], None],
) -> None:
    """Tokens per second of each side, after one warming turn; a side that fails drops out. share: of the time that is
    left now, which the turns may take. after: gets the figures after every round."""
    until = left() * (1 - share)
    found: dict[str, list[float]] = {}
    alive, longest = dict(sides), 0.0
    for n in range(rounds + 1):
        if n > 1 and left() - longest < until:
            break
        begun = time.perf_counter()
        for name in list(alive) if n % 2 else list(alive)[::-1]:
            if n and left() < 3:
                continue
            started = time.perf_counter()
            try:
                done = alive[name](n == 0)
            except Exception as e:
                print(f"{name} failed: {type(e).__name__} {str(e)[:600]}", flush=True)
                del alive[name]
                found = {k: v for k, v in found.items() if k != name and not k.startswith(f"{name}, ")}
                continue
            if not isinstance(done, Done):
                done = Done(done, time.perf_counter() - started)
            for mark, seconds in {"": done.seconds, **done.marks}.items():
                rate, key = round(done.tokens / seconds, 1), f"{name}, {mark}" if mark else name
                print(f"round {n}: {key}: {rate:,.1f} tokens/s (of {done.tokens:,})", file=sys.stderr, flush=True)
                if n:
                    found.setdefault(key, []).append(rate)
        longest = max(longest, time.perf_counter() - begun)
        if n:
            after(found)


def best(found: dict[str, list[float]], *names: str) -> float | None:
    """The median of the first side that was measured."""
    return next((middle(found[n]) for n in names if n in found), None)


def compare(
    asked: dict[str, Asker], rows: Sequence[Sequence[int]], facts: TargetFacts, target: Path
) -> list[dict[str, Any]]:
    """Per way and row: relative L2 of each stream against the first way's."""
    base: list[States] | None = None
    out: list[dict[str, Any]] = []
    for name in ("tapped-v1", "tapped", "example"):
        if name not in asked:
            continue
        made: list[Any] = []
        if name == "example":
            answers = (
                asked[name].post(prompt=list(r), max_tokens=1, temperature=0, kv_transfer_params={}) for r in rows
            )
            made = [load_example(a, r) for a, r in zip(answers, rows, strict=True)]
        else:
            with suppress(StopIteration):
                made = [s for _, states in asked[name]._stream(rows, target, True) for s in states]
        by_length = sorted(rows, key=len)
        for i, states in enumerate(made):
            of = base[i] if base is not None and name != "example" else None
            if name == "example" and base is not None:
                of = base[by_length.index(rows[i])]
            if isinstance(states, torch.Tensor):  # [tokens, layers, hidden]
                mine = [states[:, k] for k in range(states.shape[1])]
                start = of.final_start if of is not None else 0
                mine[-1] = mine[-1][start:]
            else:
                mine = [*states.aux.unbind(1), states.final]
            theirs = [*of.aux.unbind(1), of.final] if of is not None and of.final is not None else mine
            out.append(
                {
                    "way": name,
                    "tokens": len(mine[0]),
                    "against": of is not None,
                    "streams": [round(relative_l2(a, b), 6) for a, b in zip(mine, theirs, strict=True)],
                    "argmax_equal": _equal_tops(states, of),
                }
            )
        if base is None and name != "example":
            base = made
    return out


def _equal_tops(a: Any, b: Any) -> float | None:
    if b is None or not isinstance(a, States) or a.argmax is None or b.argmax is None:
        return None
    return round(float((a.argmax == b.argmax).float().mean()), 4)
