"""From the runner to files: a ring that is used again and again, requests that outlive their place, the newer runner."""

import errno
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

from draftsmith.engine.plugin_src.draftsmith_vllm import carry, ring, states
from draftsmith.engine.plugin_src.draftsmith_vllm.carry import Carrier
from draftsmith.engine.plugin_src.draftsmith_vllm.kept import Kept

HIDDEN, LAYERS = 4, [1, 3, 8]


def value(token: int, layer: int) -> float:
    return float(token * 4 + layer)


def given(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.tensor([[[value(t, k)] * HIDDEN for k in range(3)] for t in tokens]).bfloat16()
    return made[:, :2].contiguous(), made[:, 2].contiguous(), torch.tensor(tokens, dtype=torch.int32)


class Hand:
    """A runner's thread: hands steps over as the tap does. placed: request → (its first position, tokens), in order."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier

    def rows(self, tokens: list[int], placed: dict[Kept, tuple[int, int]], device: str = "cpu") -> None:
        streams, last, ids = (t.to(device) for t in given(tokens))
        numbers = np.array([k.number for k in placed], dtype=np.int32)
        at, counts = np.array(list(placed.values()), dtype=np.int32).T
        aux = [*streams.unbind(1), last]
        self.carrier.rows(aux, ids, numbers, at, counts, list(placed))
        for t in (*aux, ids):
            t.fill_(-1)  # the next step's buffers are the same

    def step(self, tokens: list[int], placed: dict[Kept, tuple[int, int]], *ended: Kept) -> None:
        self.rows(tokens, placed)
        self.end(*ended)

    def end(self, *ended: Kept) -> None:
        for kept in ended:
            self.carrier.ended(kept)
        self.carrier.commit()


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


def slow(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, seconds: float) -> None:
    method = getattr(cls, name)

    def slower(*args: Any) -> Any:
        time.sleep(seconds)
        return method(*args)

    monkeypatch.setattr(cls, name, slower)


@pytest.fixture
def carrier(tmp_path: Path) -> Carrier:
    return Carrier(tmp_path, LAYERS, HIDDEN, max_tokens=8)  # 16 rows on the device, a ring of 32


@pytest.fixture
def hand(carrier: Carrier) -> Hand:
    return Hand(carrier)


def test_a_long_request_beside_many_short_ones_keeps_its_tokens(hand: Hand, tmp_path: Path) -> None:
    long, tokens = Kept("long", 2), []
    for step in range(60):  # the ring is filled eleven times over
        own, other = [step], list(range(100 + step, 105 + step))
        short = Kept(f"s{step}", 3)
        hand.rows(own + other, {long: (step, 1), short: (0, 5)})
        hand.carrier.tops(torch.tensor([7, 8]), np.array([4, 5]))
        hand.end(short)
        tokens += own
    hand.end(long)
    check(wait_for(tmp_path / "long.safetensors"), tokens, 2)
    for step in range(60):
        found = wait_for(tmp_path / f"s{step}.safetensors")
        check(found, list(range(100 + step, 105 + step)), 3)
        assert found["argmax"].tolist() == [-1, -1, -1, 7, 8]


def test_requests_of_every_length_share_a_ring_that_is_too_small(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, Kept, "write", 0.002)  # places are reused meanwhile?
    random = np.random.default_rng(3)
    live: dict[Kept, tuple[list[int], int]] = {}
    whole: dict[str, tuple[list[int], int]] = {}
    for step in range(300):
        while len(live) < 3:
            name, first = f"q{len(whole) + len(live)}-{step}", int(random.integers(0, 3))
            live[Kept(name, first)] = ([], int(random.integers(3, 40)))
        placed, tokens = {}, []
        for kept, (own, _) in live.items():
            n = 1 if own else int(random.integers(1, 4))
            new = [int(t) for t in random.integers(0, 60, n)]
            placed[kept] = (len(own), n)
            own += new
            tokens += new
        hand.rows(tokens, placed)
        most_likely = random.permutation(len(tokens))  # those of a prompt's middle come before those of the ends
        hand.carrier.tops(torch.tensor([tokens[i] + 1 for i in most_likely]), most_likely)
        over = [k for k, (own, most) in live.items() if len(own) >= most]
        for kept in over:
            whole[kept.name] = (live.pop(kept)[0], kept.first)
        hand.end(*over)
    assert len(whole) > 30
    for name, (own, first) in whole.items():
        found = wait_for(tmp_path / f"{name}.safetensors")
        check(found, own, first)
        assert found["argmax"].tolist() == [-1] * first + [t + 1 for t in own[first:]]


def test_the_runner_waits_where_files_are_not_written(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), Kept.write
    monkeypatch.setattr(Kept, "write", lambda *a: (go.wait(), write(*a))[1])
    done: list[int] = []

    def run() -> None:
        for step in range(20):
            kept = Kept(f"r{step}", 0)
            hand.step(list(range(8)), {kept: (0, 8)}, kept)
            done.append(step)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.15)
    # four steps fill the ring, and as many as may wait on the device lie before it
    assert len(done) == 4 + carry.AT_ONCE
    go.set()
    thread.join(5)
    for step in range(20):
        check(wait_for(tmp_path / f"r{step}.safetensors"), list(range(8)), 0)


def test_small_steps_do_not_hold_the_runner_and_are_taken_together(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, copies = Carrier._take, list[int]()
    go = threading.Event()
    monkeypatch.setattr(Carrier, "_take", lambda *a: (go.wait(), take(*a))[1])
    copy = Carrier._copy

    def copy_step(self: Carrier, steps: list[carry.Step], n: int) -> None:
        copies.append(n)
        copy(self, steps, n)

    monkeypatch.setattr(Carrier, "_copy", copy_step)
    kept = Kept("small", 0)
    for step in range(2 * 8):  # as many rows as two full steps have; our thread has taken none of them yet
        hand.step([step], {kept: (step, 1)})
    hand.end(kept)
    go.set()
    check(wait_for(tmp_path / "small.safetensors"), list(range(16)), 0)
    assert copies == [8, 8]


def test_a_request_that_is_written_is_forgotten(hand: Hand, tmp_path: Path) -> None:
    kept = Kept("long", 0)
    for step in range(80):  # more than the ring holds: some of it had to be moved out
        hand.step([step], {kept: (step, 1)})
    hand.end(kept)
    check(wait_for(tmp_path / "long.safetensors"), list(range(80)), 0)
    until = time.monotonic() + 5
    while hand.carrier.requests:
        assert time.monotonic() < until
        time.sleep(0.002)
    assert not kept.moved  # the last steps still name it


def test_a_step_that_is_computed_again_counts_as_it_came_last(hand: Hand, tmp_path: Path) -> None:
    kept = Kept("again", 0)
    hand.step([1, 2, 3], {kept: (0, 3)})
    hand.step([4], {kept: (3, 1)})
    hand.step([1, 2, 3, 5], {kept: (0, 4)})  # thrown out of the engine's memory, and another token sampled
    hand.step([6], {kept: (4, 1)}, kept)
    check(wait_for(tmp_path / "again.safetensors"), [1, 2, 3, 5, 6], 0)


def test_rows_that_nobody_asked_for_are_nobodys(hand: Hand, tmp_path: Path) -> None:
    kept = Kept("own", 1)
    for at in range(0, 12, 2):
        streams, last, ids = given([90, at, at + 1, 91, 92])
        numbers = np.array([0, kept.number, 0], dtype=np.int32)
        here, counts = np.array([7, at, 3], dtype=np.int32), np.array([1, 2, 2], dtype=np.int32)
        hand.carrier.rows([*streams.unbind(1), last], ids, numbers, here, counts, [None, kept, None])
        hand.end()
    hand.end(kept)
    check(wait_for(tmp_path / "own.safetensors"), list(range(12)), 1)


def test_a_step_longer_than_the_engine_said_costs_its_requests_alone(
    hand: Hand, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carry.logger, "propagate", True)
    cut, sound = Kept("cut", 0), Kept("sound", 0)
    hand.step([1], {cut: (0, 1)})
    hand.rows(list(range(20)), {cut: (1, 20)})
    hand.carrier.tops(torch.tensor([4]), np.array([19]))
    hand.step([22, 5], {cut: (21, 1), sound: (0, 1)}, cut, sound)
    check(wait_for(tmp_path / "sound.safetensors"), [5], 0)
    assert "a step of 20 tokens, where the engine said at most 8" in caplog.text
    assert not (tmp_path / "cut.safetensors").exists()


def test_an_engine_that_stands_still_for_its_states_is_told(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ring, "PERIOD", 0.0)
    monkeypatch.setattr(ring.logger, "propagate", True)
    slow(monkeypatch, Carrier, "_copy", 0.05)
    kept = Kept("slow", 0)
    for step in range(5):
        hand.step(list(range(8 * step, 8 * step + 8)), {kept: (8 * step, 8)})
    hand.end(kept)
    check(wait_for(tmp_path / "slow.safetensors"), list(range(40)), 0)
    assert "the engine waited" in caplog.text


@pytest.mark.gpu
def test_from_a_gpu_come_the_same_files(tmp_path: Path) -> None:
    carrier, random = Carrier(tmp_path, LAYERS, HIDDEN, max_tokens=32), np.random.default_rng(5)
    hand = Hand(carrier)
    live = {Kept(f"g{i}", 0): list[int]() for i in range(6)}
    for _ in range(400):
        placed, tokens = {}, []
        for kept, own in live.items():
            n = 1 if own else int(random.integers(1, 5))
            new = [int(t) for t in random.integers(0, 60, n)]
            placed[kept] = (len(own), n)
            own += new
            tokens += new
        hand.rows(tokens, placed, "cuda")
        ends = np.cumsum([n for _, n in placed.values()]) - 1
        carrier.tops(torch.tensor([tokens[i] + 1 for i in ends], device="cuda"), ends)
        hand.end()
    hand.end(*live)
    for kept, own in live.items():
        found = wait_for(tmp_path / f"{kept.name}.safetensors")
        check(found, own, 0)
        assert found["argmax"][-300:].tolist() == [t + 1 for t in own[-300:]]


def test_a_position_that_is_missing_gives_no_file(
    hand: Hand, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carry.logger, "propagate", True)
    broken, sound = Kept("broken", 0), Kept("sound", 0)
    hand.step([1, 2, 3], {broken: (0, 3)})
    hand.step([5, 6], {broken: (4, 1), sound: (0, 1)}, broken, sound)
    wait_for(tmp_path / "sound.safetensors")
    hand.carrier.pool.shutdown()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sound.safetensors"]
    assert "positions 3 and on are missing of broken" in caplog.text


def test_a_full_disk_is_waited_for_and_nothing_is_lost(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carry, "FULL_PAUSE", 0.01)
    writev, taken = os.writev, threading.Event()

    def no_room(descriptor: int, parts: list[memoryview]) -> int:
        if not taken.is_set():
            os.write(descriptor, bytes(parts[0]))  # some of it fits
            raise OSError(errno.ENOSPC, "No space left on device")
        return writev(descriptor, parts)

    monkeypatch.setattr(os, "writev", no_room)
    requests = [Kept(f"r{i}", 0) for i in range(40)]
    runner = threading.Thread(target=lambda: [hand.step([i, i + 1], {k: (0, 2)}, k) for i, k in enumerate(requests)])
    runner.start()
    time.sleep(0.3)
    assert runner.is_alive()  # the ring and the rows on the device are full: it waits, none is dropped
    assert not list(tmp_path.glob("*.safetensors"))
    taken.set()
    runner.join(10)
    for i, kept in enumerate(requests):
        check(wait_for(tmp_path / f"{kept.name}.safetensors"), [i, i + 1], 0)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_stays_full_or_fails_leaves_nothing_and_the_engine_goes_on(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(carry, "FULL", 0.05 if number == errno.ENOSPC else 1000.0)
    writev, faults = os.writev, iter([True] * (3 if number == errno.ENOSPC else 1))

    def no_room(descriptor: int, parts: list[memoryview]) -> int:
        if next(faults, False):
            raise OSError(number, os.strerror(number))
        return writev(descriptor, parts)

    monkeypatch.setattr(carry, "FULL_PAUSE", 0.06)
    monkeypatch.setattr(os, "writev", no_room)
    first, second = Kept("first", 0), Kept("second", 0)
    for kept in (first, second):
        hand.step([1, 2], {kept: (0, 2)}, kept)
        time.sleep(0.4)
    check(wait_for(tmp_path / "second.safetensors"), [1, 2], 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["second.safetensors"]


def test_what_one_call_does_not_write_is_written_after_it(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "writev", lambda d, parts: os.write(d, bytes(parts[0][:11])))
    kept = Kept("short", 1)
    for step in range(3):
        hand.step([step, 50], {kept: (step, 1), Kept("other", 0): (step, 1)})
    hand.end(kept)
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


def test_the_file_says_its_layers(hand: Hand, tmp_path: Path) -> None:
    kept = Kept("one", 0)
    hand.step([3], {kept: (0, 1)}, kept)
    wait_for(tmp_path / "one.safetensors")
    raw = (tmp_path / "one.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"] == {"layers": "[1, 3, 8]", "start": "0"}
