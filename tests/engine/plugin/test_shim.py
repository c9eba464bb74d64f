"""The shim on small modules with the shapes of vLLM's: the streams it records are the ones that really enter each layer,
the output stays what it was, and a class whose form it cannot prove is refused and left alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from draftsmith.engine.plugin_src.draftsmith_vllm.shim import RefusedError, give

H, N = 8, 5


class FusedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, *args: Any) -> Any:
        return self.forward_native(*args)

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return nn.functional.layer_norm(x, (H,)) * self.weight
        whole = x + residual
        return nn.functional.layer_norm(whole, (H,)) * self.weight, whole


class ForgetfulNorm(FusedNorm):
    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return nn.functional.layer_norm(x, (H,)) * self.weight, residual


class OddNorm(FusedNorm):
    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return x if residual is None else (x, 2 * x)


class Fused(nn.Module):
    """As most of vLLM's decoder layers: (hidden, residual) in and out."""

    Norm: type = FusedNorm

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.mix = self.Norm(), nn.Linear(H, H)

    def forward(self, positions: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            hidden_states, residual = self.input_layernorm(hidden_states), hidden_states
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return self.mix(hidden_states), residual


class Spent(Fused):
    """As Cohere's: the whole stream and a residual that is of no more use."""

    Norm = ForgetfulNorm

    def forward(self, positions: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        residual = hidden_states
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return residual + self.mix(hidden_states), residual


class Odd(Fused):
    Norm = OddNorm


class Plain(nn.Module):
    """One tensor in, the same tensor, written over, out."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(H, H)

    def forward(self, positions: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.add_(self.mix(hidden_states))


class Nameless(nn.Module):
    def forward(self, positions: Any, stream: torch.Tensor) -> torch.Tensor:
        return stream


class Inner(nn.Module):
    def __init__(self, layer: type[nn.Module], lists: int = 1) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, H)
        self.layers = nn.ModuleList(layer() for _ in range(N))
        self.layers[0].experts = nn.ModuleList(nn.Linear(H, H) for _ in range(N))
        if lists > 1:
            self.others = nn.ModuleList(layer() for _ in range(N))
        self.seen: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor, positions: Any = None) -> torch.Tensor:
        hidden, residual, self.seen = self.embed_tokens(input_ids), None, []
        for layer in self.layers:
            if isinstance(layer, Fused):
                self.seen.append(
                    (hidden if residual is None or isinstance(layer, Spent) else hidden + residual).clone()
                )
                hidden, residual = layer(positions, hidden, residual)
            else:
                self.seen.append(hidden.clone())
                hidden = layer(positions, hidden)
        whole = hidden if residual is None or isinstance(self.layers[0], Spent) else hidden + residual
        self.seen.append(whole.clone())
        return 2 * whole


class Outer(nn.Module):
    def __init__(self, layer: type[nn.Module], lists: int = 1) -> None:
        super().__init__()
        self.model = Inner(layer, lists)

    def forward(self, input_ids: torch.Tensor, positions: Any = None) -> torch.Tensor:
        return self.model(input_ids, positions) + 1


class Wrapper(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.vision = nn.ModuleList(Plain() for _ in range(N))
        self.language_model = Outer(layer)

    def get_language_model(self) -> nn.Module:
        return self.language_model

    def forward(self, input_ids: torch.Tensor, positions: Any = None) -> torch.Tensor:
        return self.language_model(input_ids, positions)


class Single(Inner):
    """The model and the owner of the layers are one."""


CONFIG = SimpleNamespace(num_hidden_layers=N, hidden_size=H)
IDS = torch.tensor([3, 1, 4, 1, 5])


@pytest.mark.parametrize("layer", [Fused, Spent, Plain])
@pytest.mark.parametrize("shape", [Outer, Wrapper, Single])
@torch.no_grad()
def test_the_streams_are_those_that_enter(layer: type[nn.Module], shape: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model: Any = shape(layer)
    before, name, module = model(IDS), type(model).__qualname__, type(model).__module__
    give(model, CONFIG)
    assert (type(model).__qualname__, type(model).__module__) == (name, module) and isinstance(model, shape)
    assert model.supports_eagle3 and not model.has_own_lm_head and not model.has_own_embed_tokens
    assert model.get_eagle3_default_aux_hidden_state_layers() == (2, 2, 2)
    inner = model if shape is Single else next(m for m in model.modules() if isinstance(m, Inner))
    for ids in ((0, 2, N), (4, 1)):
        model.set_aux_hidden_state_layers(ids)
        for _ in range(2):
            out, states = model(IDS)
            assert torch.equal(out, before)
            assert len(states) == len(ids)
            for k, state in zip(sorted(ids), states, strict=True):
                assert torch.allclose(state, inner.seen[k], atol=1e-6), k


def test_another_model_of_the_class_is_untouched() -> None:
    one, other = Outer(Fused), Outer(Fused)
    give(one, CONFIG)
    assert not hasattr(other, "supports_eagle3") and not isinstance(other(IDS), tuple)


@pytest.mark.parametrize(
    ("make", "config", "words"),
    [
        (lambda: Outer(Odd), CONFIG, "unknown residual"),
        (lambda: Outer(Fused, lists=2), CONFIG, "2 lists of 5"),
        (lambda: Outer(Fused), SimpleNamespace(num_hidden_layers=7, hidden_size=H), "0 lists of 7"),
    ],
)
def test_what_cannot_be_proved_is_refused(make: Any, config: Any, words: str) -> None:
    model = make()
    with pytest.raises(RefusedError, match=words):
        give(model, config)
    assert not hasattr(model, "supports_eagle3") and not isinstance(model(IDS), tuple)


def test_pipeline_stages_and_bad_ids_are_refused() -> None:
    with pytest.raises(RefusedError, match="pipeline"):
        give(Outer(Fused), CONFIG, pipeline_stages=2)
    model: Any = Outer(Fused)
    give(model, CONFIG)
    for ids in ((), (-1, 2), (N + 1,)):
        with pytest.raises(RuntimeError, match="aux layer ids"):
            model.set_aux_hidden_state_layers(ids)
    unnamed: Any = Outer(Nameless)
    give(unnamed, CONFIG)
    with pytest.raises(RefusedError, match="none of hidden_states"):
        unnamed.set_aux_hidden_state_layers((2,))


@pytest.mark.slow
@torch.no_grad()
def test_it_holds_when_traced() -> None:
    """The states are outputs of one traced graph, as torch.compile needs them."""
    torch.manual_seed(0)
    model: Any = Outer(Fused)
    give(model, CONFIG)
    model.set_aux_hidden_state_layers((1, 3, N))
    out, states = model(IDS)
    inner = model.model
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    inner.seen = []
    compiled = torch.compile(inner.forward, fullgraph=True, backend=keep)
    again, traced = compiled(IDS)
    assert len(graphs) == 1
    assert torch.allclose(again + 1, out) and all(torch.allclose(a, b) for a, b in zip(traced, states, strict=True))
