"""The whole optimizer step as one CUDA graph: for drafters so small that launching kernels takes longer than running
them. A graph serves one shape (Plan.shape); each new shape is warmed up and captured once, the oldest is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftsmith.train.batch import StepBatch
from draftsmith.train.fused.adamw import FusedAdamW
from draftsmith.train.fused.plan import Plan
from draftsmith.train.fused.step import FusedStep
from draftsmith.train.objective import StepStats

T = TypeVar("T")


def _map(value: T, change: Any) -> T:
    """A dataclass (nested ones too) with every tensor replaced."""
    out = {}
    for f in fields(value):  # type: ignore[arg-type]
        x = getattr(value, f.name)
        if isinstance(x, Tensor):
            out[f.name] = change(x)
        elif isinstance(x, tuple) and x and isinstance(x[0], Tensor):
            out[f.name] = tuple(change(t) for t in x)
        elif is_dataclass(x):
            out[f.name] = _map(x, change)
    return replace(value, **out)  # type: ignore[type-var]


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    _map(value, note)
    return found


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: tuple[Tensor, StepStats, Tensor]
    memory: Tensor  # the arena's block that the graph's addresses lie in


class CapturedStep:
    """loss_and_grads and the optimizer's update by graph replay. The tensors that it returns are overwritten by the
    next call of the same shape."""

    def __init__(self, step: FusedStep, optimizer: FusedAdamW, weights: Sequence[float], keep: int = 8) -> None:
        self.step, self.optimizer, self.weights, self.keep = step, optimizer, list(weights), keep
        self.graphs: dict[Any, _Graph] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: StepBatch, plan: Plan, lr: float) -> tuple[Tensor, StepStats, Tensor]:
        """One optimizer step: loss, figures, gradient norm (device tensors)."""
        self.optimizer.set_lr(lr)
        key = plan.shape
        if key not in self.graphs:
            while len(self.graphs) >= self.keep:
                self.graphs.pop(next(iter(self.graphs)))
            return self._capture(key, batch, plan)
        graph = self.graphs[key]
        torch._foreach_copy_(graph.inputs, _tensors(batch) + _tensors(plan))
        graph.graph.replay()
        return graph.result

    def _run(self, batch: StepBatch, plan: Plan) -> tuple[Tensor, StepStats, Tensor]:
        loss, stats = self.step.loss_and_grads(batch, plan, self.weights)
        return loss, stats, self.optimizer.step()

    def _capture(self, key: Any, batch: StepBatch, plan: Plan) -> tuple[Tensor, StepStats, Tensor]:
        """This call's step is run plainly (it warms the kernels up); then the graph is recorded, which runs nothing."""
        batch, plan = _map(batch, torch.clone), _map(plan, torch.clone)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = self._run(batch, plan)
            self.step.arena.reset()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            captured = self._run(batch, plan)
        self.graphs[key] = _Graph(graph, _tensors(batch) + _tensors(plan), captured, self.step.arena.block)
        return result
