"""From the runner to files: a ring that is used again and again, requests that outlive their place, the newer runner."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Bag
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftsmith.engine.plugin_src.draftsmith_vllm import carry, states
from draftsmith.engine.plugin_src.draftsmith_vllm.carry import Carrier
from draftsmith.engine.plugin_src.draftsmith_vllm.kept import Kept

HIDDEN, LAYERS = 4, [1, 3, 8]


def value(token: int, layer: int) -> float:
    return float(token * 4 + layer)


def given(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.tensor([[[value(t, k)] * HIDDEN for k in range(3)] for t in tokens]).bfloat16()
    return made[:, :2].contiguous(), made[:, 2].contiguous(), torch.tensor(tokens, dtype=torch.int32)


def at(placed: dict[Kept, tuple[int, int, int]]) -> list[tuple[Kept, int, int, int]]:
    return [(kept, *where) for kept, where in placed.items()]


def wait_for(path: Path) -> dict[str, torch.Tensor]:
    until = time.monotonic() + 5
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} did not come"
        time.sleep(0.002)
    return load_file(path)


def check(found: dict[str, torch.Tensor], tokens: list[int], first: int) -> None:
    streams, last, ids = given(tokens)
    assert torch.equal(found["streams"], streams) and torch.equal(found["token_ids"], ids)
    assert torch.equal(found["last"], last[first:])


@pytest.fixture
def carrier(tmp_path: Path) -> Carrier:
    return Carrier(tmp_path, LAYERS, HIDDEN, max_tokens=8)  # a ring of 32 rows


def test_a_long_request_beside_many_short_ones_keeps_its_tokens(carrier: Carrier, tmp_path: Path) -> None:
    long, tokens = Kept("long", 2), []
    for step in range(60):  # the ring is filled eleven times over
        own, other = [step], list(range(100 + step, 105 + step))
        short = Kept(f"s{step}", 0)
        carrier.rows(*given(own + other), at({long: (step, 0, 1), short: (0, 1, 5)}))
        carrier.tops(torch.tensor([7, 8]), at({short: (3, 0, 2)}))
        carrier.ended(short)
        tokens += own
    carrier.ended(long)
    check(wait_for(tmp_path / "long.safetensors"), tokens, 2)
    for step in range(60):
        found = wait_for(tmp_path / f"s{step}.safetensors")
        check(found, list(range(100 + step, 105 + step)), 0)
        assert found["argmax"].tolist() == [-1, -1, -1, 7, 8]


def test_requests_of_every_length_share_a_ring_that_is_too_small(
    carrier: Carrier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Kept.write
    monkeypatch.setattr(Kept, "write", lambda *a: (time.sleep(0.002), write(*a))[1])  # places are reused meanwhile?
    random = np.random.default_rng(3)
    live: dict[Kept, tuple[list[int], int]] = {}
    whole: dict[str, tuple[list[int], int]] = {}
    for step in range(150):
        while len(live) < 3:
            name, first = f"q{len(whole) + len(live)}-{step}", int(random.integers(0, 3))
            live[Kept(name, first)] = ([], int(random.integers(3, 40)))
        placed, tokens = {}, []
        for kept, (own, _) in live.items():
            n = 1 if own else int(random.integers(1, 4))
            new = [int(t) for t in random.integers(0, 60, n)]
            placed[kept] = (len(own), len(tokens), n)
            own += new
            tokens += new
        carrier.rows(*given(tokens), at(placed))
        for kept in [k for k, (own, most) in live.items() if len(own) >= most]:
            whole[kept.name] = (live.pop(kept)[0], kept.first)
            carrier.ended(kept)
    assert len(whole) > 15
    for name, (own, first) in whole.items():
        check(wait_for(tmp_path / f"{name}.safetensors"), own, first)


def test_the_runner_waits_where_files_are_not_written(
    carrier: Carrier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), Kept.write
    monkeypatch.setattr(Kept, "write", lambda *a: (go.wait(), write(*a))[1])
    done: list[int] = []

    def run() -> None:
        for step in range(20):
            kept = Kept(f"r{step}", 0)
            carrier.rows(*given(list(range(8))), at({kept: (0, 0, 8)}))
            carrier.ended(kept)
            done.append(step)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.15)
    # four steps fill the ring, and as many as may wait on the device lie before it
    assert len(done) <= 4 + 1 + carry.AT_ONCE
    go.set()
    thread.join(5)
    for step in range(20):
        check(wait_for(tmp_path / f"r{step}.safetensors"), list(range(8)), 0)


def test_small_steps_do_not_hold_the_runner_and_are_waited_for_together(
    carrier: Carrier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, take, arrivals = threading.Event(), Carrier._do_rows, []
    monkeypatch.setattr(Carrier, "_do_rows", lambda *a: (go.wait(), take(*a))[1])
    done = carrier.waiting.done
    monkeypatch.setattr(carrier.waiting, "done", lambda n: (arrivals.append(n), done(n))[1])
    kept = Kept("small", 0)
    for step in range(2 * 8):  # as many rows as two full steps have; our thread has taken none of them yet
        carrier.rows(*given([step]), at({kept: (step, 0, 1)}))
    go.set()
    carrier.ended(kept)
    check(wait_for(tmp_path / "small.safetensors"), list(range(16)), 0)
    assert arrivals == [8, 8]


def test_a_written_request_holds_no_memory_while_the_ring_still_names_it(carrier: Carrier, tmp_path: Path) -> None:
    kept = Kept("long", 0)
    for step in range(24):  # more pieces than are written as they lie: gathered
        carrier.rows(*given([step]), at({kept: (step, 0, 1)}))
    carrier.ended(kept)
    check(wait_for(tmp_path / "long.safetensors"), list(range(24)), 0)
    until = time.monotonic() + 5
    while not kept.written:
        assert time.monotonic() < until
        time.sleep(0.002)
    assert carrier._ring is not None and any(kept is k for s in carrier._ring.filled for k, *_ in s.placed)
    assert not kept.pieces and not kept.notes


def test_an_engine_that_stands_still_for_its_states_is_told(
    carrier: Carrier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(carry, "PERIOD", 0.0)
    monkeypatch.setattr(carry.logger, "propagate", True)
    take = Carrier._do_rows
    monkeypatch.setattr(Carrier, "_do_rows", lambda *a: (time.sleep(0.05), take(*a))[1])
    kept = Kept("slow", 0)
    for step in range(4):
        carrier.rows(*given(list(range(8 * step, 8 * step + 8))), at({kept: (8 * step, 0, 8)}))
    carrier.ended(kept)
    check(wait_for(tmp_path / "slow.safetensors"), list(range(32)), 0)
    assert "the engine waited" in caplog.text


@pytest.mark.gpu
def test_from_a_gpu_come_the_same_files(tmp_path: Path) -> None:
    carrier, random = Carrier(tmp_path, LAYERS, HIDDEN, max_tokens=32), np.random.default_rng(5)
    live = {Kept(f"g{i}", 0): list[int]() for i in range(6)}
    for _ in range(400):
        placed, tokens = {}, []
        for kept, own in live.items():
            n = 1 if own else int(random.integers(1, 5))
            new = [int(t) for t in random.integers(0, 60, n)]
            placed[kept] = (len(own), len(tokens), n)
            own += new
            tokens += new
        streams, last, ids = (t.cuda() for t in given(tokens))
        carrier.rows(streams.clone(), last.clone(), ids.clone(), at(placed))
        ends = {k: (at + n - 1, i, 1) for i, (k, (at, _, n)) in enumerate(placed.items())}
        carrier.tops(torch.stack([ids[begin + n - 1] + 1 for _, begin, n in placed.values()]).long(), at(ends))
        for t in (streams, last, ids):
            t.fill_(-1)
    for kept, own in live.items():
        carrier.ended(kept)
        found = wait_for(tmp_path / f"{kept.name}.safetensors")
        check(found, own, 0)
        assert found["argmax"][-300:].tolist() == [t + 1 for t in own[-300:]]


def test_a_position_that_is_missing_gives_no_file(carrier: Carrier, tmp_path: Path) -> None:
    broken, sound = Kept("broken", 0), Kept("sound", 0)
    carrier.rows(*given([1, 2, 3]), at({broken: (0, 0, 3)}))
    carrier.rows(*given([5, 6]), at({broken: (4, 0, 1), sound: (0, 1, 1)}))
    carrier.ended(broken)
    carrier.ended(sound)
    wait_for(tmp_path / "sound.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sound.safetensors"]


def test_a_full_disk_leaves_nothing_and_the_engine_goes_on(
    carrier: Carrier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev = os.writev
    full = iter([True])

    def no_room(descriptor: int, parts: list[memoryview]) -> int:
        if next(full, False):
            raise OSError(28, "No space left on device")
        return writev(descriptor, parts)

    monkeypatch.setattr(os, "writev", no_room)
    first, second = Kept("first", 0), Kept("second", 0)
    for kept in (first, second):
        carrier.rows(*given([1, 2]), at({kept: (0, 0, 2)}))
        carrier.ended(kept)
        time.sleep(0.05)
    check(wait_for(tmp_path / "second.safetensors"), [1, 2], 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["second.safetensors"]


def test_what_one_call_does_not_write_is_written_after_it(
    carrier: Carrier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "writev", lambda d, parts: os.write(d, bytes(parts[0][:11])))
    kept = Kept("short", 1)
    for step in range(3):
        carrier.rows(*given([step, 50]), at({kept: (step, 0, 1)}))
    carrier.ended(kept)
    check(wait_for(tmp_path / "short.safetensors"), [0, 1, 2], 1)


class Newer:
    """The parts of vLLM's newer runner that the tap touches (0.23 to 0.33), in their order."""

    def __init__(self) -> None:
        self.speculative_config, self.max_num_tokens = None, 8
        self.model_config = Bag(get_hidden_size=lambda: HIDDEN)
        self.execute_model_state: Any = None
        self.use_aux_hidden_state_outputs = False

    def load_model(self) -> None:
        assert not self.use_aux_hidden_state_outputs  # with it the real one would look for a drafter's config
        self.model = Model()

    def get_model(self) -> Any:
        return self.model

    def execute_model(self, step: Any, intermediate: Any = None, dummy_run: bool = False) -> None:
        if not step.total_num_scheduled_tokens:
            return
        counts = step.num_scheduled_tokens
        order = sorted(counts, key=lambda r: (counts[r] != 1, counts[r]))  # decodes first
        tokens = [t for r in order for t in step.tokens[r][step.computed[r] :][: counts[r]]]
        buffer = torch.tensor([*tokens, 99, 99], dtype=torch.int32)
        aux = [torch.tensor([[value(int(t), k)] * HIDDEN for t in buffer]) for k in range(3)]
        hidden = buffer.float().unsqueeze(1)
        batch = Bag(
            req_ids=order,
            num_scheduled_tokens=np.array([counts[r] for r in order]),
            num_computed_tokens_np=np.array([step.computed[r] for r in order]),
            input_ids=buffer,
            last=np.cumsum([counts[r] for r in order]) - 1,
        )
        self.execute_model_state = Bag(input_batch=batch, hidden_states=hidden, aux_hidden_states=aux)

    def sample_tokens(self) -> None:
        state, self.execute_model_state = self.execute_model_state, None
        self.sample(state.hidden_states, state.input_batch)
        for t in (state.input_batch.input_ids, *state.aux_hidden_states):
            t.fill_(-1)  # the next step's buffers are the same

    def sample(self, hidden: torch.Tensor, batch: Any) -> None:
        self.model.compute_logits(hidden[batch.last])


class Model:
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        assert layers == (1, 3, 8)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() + 1, 200).float()


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    interfaces = Bag(supports_eagle3=lambda model: True)
    monkeypatch.setitem(__import__("sys").modules, "vllm.model_executor.models.interfaces", interfaces)
    cls = type("GPUModelRunner", (), dict(Newer.__dict__))
    states._tap_v2(cls, {"folder": str(tmp_path), "layers": LAYERS})
    runner: Any = cls()
    runner.load_model()
    runner._draftsmith_tap.writes = True
    yield runner


def step(
    tokens: dict[str, list[int]], new: dict[str, dict[str, Any]], finished: tuple[str, ...] = (), **parts: Any
) -> Any:
    return Bag(
        tokens=tokens,
        scheduled_new_reqs=[
            Bag(
                req_id=r,
                prompt_token_ids=tokens[r][: x.pop("prompt")],
                sampling_params=Bag(max_tokens=x.pop("most"), extra_args=x),
            )
            for r, x in new.items()
        ],
        finished_req_ids=set(finished),
        num_scheduled_tokens={r: n for r, (_, n) in parts.items()},
        computed={r: at for r, (at, _) in parts.items()},
        total_num_scheduled_tokens=sum(n for _, n in parts.values()),
    )


def test_the_newer_runner_gives_the_same_files(newer: Any, tmp_path: Path) -> None:
    tokens = {"a": list(range(10, 18)), "b": list(range(60, 66))}
    ask = {"prompt": 5, "most": 9, states.KEY: "na", states.FROM: 2}
    newer.execute_model(step(tokens, {"a": ask}, a=(0, 3)))
    newer.sample_tokens()
    rows = {"b": {"prompt": 6, "most": 1, states.KEY: "nb", states.FROM: 0}}
    newer.execute_model(step(tokens, rows, a=(3, 2), b=(0, 6)))
    newer.sample_tokens()
    # a row of a second pass ends with its prefill: its file does not wait for the scheduler's next word
    found = wait_for(tmp_path / "nb.safetensors")
    check(found, tokens["b"], 0)
    assert found["argmax"].tolist() == [t + 1 for t in tokens["b"]]
    for at in (5, 6, 7):
        newer.execute_model(step(tokens, {}, ("b",) if at == 5 else (), a=(at, 1)))
        newer.sample_tokens()
    newer.execute_model(step(tokens, {}, ("a",)))
    found = wait_for(tmp_path / "na.safetensors")
    check(found, tokens["a"], 2)
    assert found["argmax"].tolist() == [-1, -1, *(t + 1 for t in tokens["a"][2:])]


def test_warm_up_runs_and_requests_that_ask_for_no_argmax(newer: Any, tmp_path: Path) -> None:
    tokens = {"w": [1, 2], "a": [5, 6, 7]}
    newer.execute_model(step(tokens, {}, w=(0, 2)), dummy_run=True)
    newer.execute_model_state = None
    ask = {"prompt": 3, "most": 1, states.KEY: "na", states.FROM: 1, states.ARGMAX: 0}
    newer.execute_model(step(tokens, {"a": ask}, a=(0, 3)))
    newer.sample_tokens()
    found = wait_for(tmp_path / "na.safetensors")
    check(found, tokens["a"], 1)
    assert found["argmax"].tolist() == [-1, -1, -1]


def test_a_newer_runner_without_the_needed_methods_is_refused() -> None:
    with pytest.raises(RuntimeError, match="has no load_model, execute_model, sample"):
        states._tap_v2(type("GPUModelRunner", (), {}), {})


def test_the_file_says_its_layers(carrier: Carrier, tmp_path: Path) -> None:
    kept = Kept("one", 0)
    carrier.rows(*given([3]), at({kept: (0, 0, 1)}))
    carrier.ended(kept)
    wait_for(tmp_path / "one.safetensors")
    raw = (tmp_path / "one.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"] == {"layers": "[1, 3, 8]", "start": "0"}
