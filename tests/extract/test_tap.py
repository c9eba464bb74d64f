"""The plugin's tap on a runner that behaves like vLLM's (0.22 to 0.32): chunks, preemption, finishing, the file."""

import json
import time
from pathlib import Path
from types import SimpleNamespace as Bag
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.engine.plugin_src.draftsmith_vllm import states
from draftsmith.errors import UserError
from draftsmith.extract import scratch
from draftsmith.extract.wire import RUNNER, Wire
from made_states import facts

HIDDEN, VOCAB, LAYERS = 8, 50, [1, 3, 4]


def stream(layer: int, position: int, token: int) -> torch.Tensor:
    """What the fake model's layer gives for a token: tells layer, position and token apart."""
    return torch.full((HIDDEN,), layer * 100.0 + position + token / 64)


class Model:
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # the most likely token after a position is that position + 1
        return torch.nn.functional.one_hot(hidden[:, 0].long() + 1, VOCAB).float()


def make_runner() -> Any:
    class Runner:
        """The parts of GPUModelRunner that the tap touches, in the order in which execute_model uses them."""

        def __init__(self) -> None:
            self.model, self.speculative_config = Model(), None
            self.model_config = Bag(get_hidden_size=lambda: HIDDEN)
            self.requests: dict[str, list[int]] = {}
            self.execute_model_state: Any = None

        def _setup_eagle3_aux_hidden_state_outputs(self) -> None: ...

        def _model_forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
            aux = [
                torch.stack([stream(k, int(p), int(t)) for p, t in zip(positions, input_ids, strict=True)])
                for k in LAYERS
            ]
            return positions.float().unsqueeze(1).expand(-1, HIDDEN), aux

        def execute_model(self, step: Any) -> None:
            for new in step.scheduled_new_reqs:
                self.requests[new.req_id] = new.tokens
            for req_id in step.finished_req_ids:
                self.requests.pop(req_id, None)
            if not step.num_scheduled_tokens:
                return
            ids = list(step.num_scheduled_tokens)
            at = [step.computed[r] for r in ids]
            self.input_batch = Bag(req_ids=ids, num_computed_tokens_cpu=np.array(at))
            tokens, positions, last = [], [], []
            for r, start in zip(ids, at, strict=True):
                n = step.num_scheduled_tokens[r]
                tokens += self.requests[r][start : start + n]
                positions += range(start, start + n)
                last.append(positions[-1])
            padding = [0, 0, 0]
            self._model_forward(torch.tensor(tokens + padding), torch.tensor(positions + padding))
            self.execute_model_state = Bag(logits=self.model.compute_logits(torch.tensor(last).float().unsqueeze(1)))

    return Runner


def step(
    new: dict[str, tuple[list[int], dict[str, Any]]], finished: tuple[str, ...] = (), **parts: tuple[int, int]
) -> Any:
    """One scheduler output. new: id → (tokens, extra_args); parts: id=(already computed, tokens now)."""
    return Bag(
        scheduled_new_reqs=[
            Bag(req_id=r, tokens=t, prompt_token_ids=t[:4], sampling_params=Bag(extra_args=x))
            for r, (t, x) in new.items()
        ],
        finished_req_ids=set(finished),
        num_scheduled_tokens={r: n for r, (_, n) in parts.items()},
        computed={r: at for r, (at, _) in parts.items()},
        total_num_scheduled_tokens=sum(n for _, n in parts.values()),
    )


@pytest.fixture
def wire(tmp_path: Path) -> Any:
    with Wire(facts(HIDDEN, (1, 3), layers=4, vocab=VOCAB), tmp_path) as made:
        yield made


@pytest.fixture
def runner(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Any:
    given = json.loads(wire.environment()[states.VARIABLE])
    cls = make_runner()
    states._tap(cls, given)
    made = cls()
    made._draftsmith_tap = states.Tap(made, given)
    made._draftsmith_tap.writes = True
    return made


def alive() -> None: ...


def check(got: Any, tokens: list[int], boundary: int) -> None:
    for a, k in enumerate((1, 3)):
        want = torch.stack([stream(k, p, t) for p, t in enumerate(tokens)]).bfloat16()
        assert torch.equal(got.aux[:, a], want)
    want = torch.stack([stream(4, p, t) for p, t in enumerate(tokens)]).bfloat16()
    assert torch.equal(got.final, want[boundary - 1 :])
    assert got.token_ids.tolist() == tokens and got.final_start == boundary - 1
    assert got.argmax.tolist() == list(range(boundary, len(tokens) + 1))


A, B = list(range(10, 22)), list(range(30, 37))


def test_chunks_of_several_requests_end_in_their_own_files(runner: Any, wire: Wire) -> None:
    (na, xa), (nb, xb) = wire.ask(4), wire.ask(1)
    runner.execute_model(step({"a": (A, xa["vllm_xargs"]), "b": (B, xb["vllm_xargs"])}, a=(0, 5), b=(0, 2)))
    runner.execute_model(step({}, b=(2, 5), a=(5, 3)))  # another order in the batch
    runner.execute_model(step({"c": (A, {})}, ("b",), a=(8, 4), c=(0, 12)))  # c asks for nothing
    runner.execute_model(step({}, ("a", "c")))
    check(wire.take(na, A, 4, alive), A, 4)
    check(wire.take(nb, B, 1, alive), B, 1)
    assert [p.name for p in wire.folder.iterdir()] == [scratch.OWNER]


def test_a_preempted_request_is_filled_again_by_position(runner: Any, wire: Wire) -> None:
    name, fields = wire.ask(3)
    runner.execute_model(step({"a": (A, fields["vllm_xargs"])}, a=(0, 8)))
    runner.execute_model(step({}, a=(0, 6)))  # thrown out and begun anew
    runner.execute_model(step({}, a=(6, 6)))
    runner.execute_model(step({}, ("a",)))
    check(wire.take(name, A, 3, alive), A, 3)


def test_a_generated_answer_lacks_only_the_state_of_its_last_token(runner: Any, wire: Wire) -> None:
    name, fields = wire.ask(None)  # boundary: the prompt's end
    runner.execute_model(step({"a": (A, fields["vllm_xargs"])}, a=(0, 4)))  # prompt of 4, then a token a step
    for at in range(4, 11):
        runner.execute_model(step({}, a=(at, 1)))
    runner.execute_model(step({}, ("a",)))
    got = wire.take(name, A, 4, alive)
    assert got.tokens == 12 and torch.equal(got.aux[11], got.aux[10])
    assert got.argmax is not None and got.argmax.tolist() == [*range(4, 12), -1]


def test_a_prefix_cache_or_other_tokens_are_refused(runner: Any, wire: Wire) -> None:
    cut, fields = wire.ask(4)
    runner.execute_model(step({"a": (A, fields["vllm_xargs"])}, a=(6, 6)))  # the first 6 came from a cache
    other, more = wire.ask(4)
    runner.execute_model(step({"b": (A, more["vllm_xargs"])}, ("a",), b=(0, 12)))
    runner.execute_model(step({}, ("b",)))
    with pytest.raises(UserError, match="positions 6 to 12 of a row of 12"):
        wire.take(cut, A, 4, alive)
    with pytest.raises(UserError, match="at position 3 13, not 99"):
        wire.take(other, [*A[:3], 99, *A[4:]], 4, alive)


def test_a_name_that_is_a_path_gets_nothing(runner: Any, wire: Wire) -> None:
    runner.execute_model(step({"a": (A, {states.KEY: "../evil"})}, a=(0, 12)))
    runner.execute_model(step({}, ("a",)))
    time.sleep(0.05)
    assert not list(wire.folder.parent.glob("evil*"))
    assert [p.name for p in wire.folder.iterdir()] == [scratch.OWNER]


def test_an_engine_that_gives_no_file_is_said_to(wire: Wire) -> None:
    with pytest.raises(UserError, match="gave no states within"):
        wire.wait("nothing", alive, timeout=0.02)


def test_a_runner_without_the_needed_methods_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match="has no _setup_eagle3_aux_hidden_state_outputs, _model_forward, execute_model"
    ):
        states._tap(type("GPUModelRunner", (), {}), {})


def test_layers_must_be_ascending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(states.VARIABLE, json.dumps({"folder": "x", "layers": [3, 2]}))
    with pytest.raises(RuntimeError, match="distinct, ascending"):
        states.settings()
    monkeypatch.delenv(states.VARIABLE)
    assert states.settings() is None


def test_the_recipe_may_choose_the_runner(wire: Wire) -> None:
    assert wire.environment()[RUNNER] == "0"
    found = wire.environment({RUNNER: "1", "OTHER": "x", states.VARIABLE: "not this"})
    assert found[RUNNER] == "1" and found["OTHER"] == "x" and "layers" in found[states.VARIABLE]
