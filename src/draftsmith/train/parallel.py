"""Several processes that train one drafter (torchrun): what they exchange, and FSDP2 for the reference step.

Every rank takes its own pack of an optimizer step, or, with train.context_parallel, its own part of a pack that the
ranks of a group share (context.py). Losses are divided by the counts of all ranks, so gradients are *summed*, never
averaged, and a step is what one process would do with all packs in one.

    torchrun --nproc-per-node 2 -m draftsmith.train.worker RECIPE
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from draftsmith.drafter.model import Drafter
from draftsmith.errors import UserError
from draftsmith.recipe import TrainSection
from draftsmith.train.batch import StepBatch
from draftsmith.train.context import GroupExchange
from draftsmith.train.core import ReferenceCore
from draftsmith.train.objective import StepStats, TargetHead, reference_loss


@dataclass(frozen=True)
class Ranks:
    """rank of count processes."""

    rank: int = 0
    count: int = 1

    @staticmethod
    def current() -> Ranks:
        """Of the process group that is up; one process where there is none."""
        if dist.is_available() and dist.is_initialized():
            return Ranks(dist.get_rank(), dist.get_world_size())
        return Ranks()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Sum over ranks (a copy)."""
        if self.count == 1:
            return value
        out = value.clone()
        dist.all_reduce(out)
        return out

    def wait(self) -> None:
        """Until every rank is here."""
        if self.count > 1:
            dist.barrier()


@dataclass(frozen=True)
class Place:
    """Where a rank stands: pack `data` of the `packs` of an optimizer step, of which it takes the part of `exchange`
    (None = all of it)."""

    data: int
    packs: int
    exchange: GroupExchange | None

    @staticmethod
    def of(ranks: Ranks, section: TrainSection, device: str) -> Place:
        """Ranks of one group are neighbours. UserError where groups of train.context_parallel do not come out even."""
        size = section.context_parallel
        if size == 1:
            return Place(ranks.rank, ranks.count, None)
        if ranks.count % size:
            raise UserError(
                f"train.context_parallel is {size}, but {ranks.count} process{'es' * (ranks.count > 1)} train",
                "every sequence is shared by so many processes; some would be left over",
                f"start a multiple of {size} (torchrun --nproc-per-node), or set train.context_parallel: 1",
            )
        if section.stream != "off":
            raise UserError(
                f"train.context_parallel is {size} and train.stream is {section.stream!r}",
                "each process reads its own stream, so the engines would make every state once per process",
                "extract first (train.stream: off), or set train.context_parallel: 1",
            )
        group = context_groups(device, size).get_group("context")
        return Place(ranks.rank // size, ranks.count // size, GroupExchange(group, ranks.rank % size, size))


@lru_cache(maxsize=2)
def context_groups(device: str, size: int) -> Any:
    """Two dimensions of all ranks: packs, and parts of a pack."""
    shape = (dist.get_world_size() // size, size)
    return dist.device_mesh.init_device_mesh(device, shape, mesh_dim_names=("pack", "context"))


LAST_WORK = 0.2
"""Seconds that a group's own threads get to end in."""


def _forget_groups() -> None:
    mesh.cache_clear()
    context_groups.cache_clear()


@contextmanager
def process_group() -> Iterator[Ranks]:
    """The process group that torchrun's environment describes (NCCL on GPUs, gloo on CPUs), taken down at the end."""
    if dist.is_available() and dist.is_initialized():  # a launcher (ray) made it, and takes it down
        yield Ranks.current()
        _forget_groups()
        return
    if "RANK" not in os.environ:
        yield Ranks()
        return
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield Ranks.current()
    finally:
        _forget_groups()
        gc.collect()  # models that hold a group keep its threads alive
        dist.destroy_process_group()
        # gloo's thread lets go of its last tensors with the interpreter's lock; one that comes for it when the process is
        # already ending aborts it (seen in one run of ten, all being written), and the launcher takes that for a failure.
        time.sleep(LAST_WORK)


@lru_cache(maxsize=2)
def mesh(device: str) -> Any:
    """One dimension of all ranks."""
    return dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))


class _Objective(nn.Module):
    """The whole objective as one module: FSDP2 gathers its weights once per step, before all draft steps."""

    def __init__(self, model: Drafter, head: TargetHead | None, recompute: bool) -> None:
        super().__init__()
        self.model, self.head, self.recompute = model, head, recompute

    def forward(self, batch: StepBatch, K: int, weights: Sequence[float], counts: Tensor) -> tuple[Tensor, StepStats]:
        return reference_loss(self.model, batch, K, weights, self.head, counts, recompute=self.recompute)


class ShardedCore(ReferenceCore):
    """FSDP2: each rank keeps 1/n of the float32 weights and moments; they are gathered in the model's type (bfloat16 on
    a GPU), gradients are summed in float32."""

    def __init__(self, model: Drafter, head: TargetHead | None, section: TrainSection, recompute: bool = False) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        kind = model.fc.weight.dtype
        self.model, self.head, self.recompute = model.float(), head, recompute
        if model.lent_embedding is not None:
            model.lent_embedding = model.lent_embedding.to(kind)
        self.objective = _Objective(model, head, recompute)
        policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(
            self.objective, mesh=mesh(model.fc.weight.device.type), reshard_after_forward=False, mp_policy=policy
        )
        self.objective.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        self.objective.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        self._adam(section)

    def step(self, batch: StepBatch, K: int, weights: Sequence[float], counts: Tensor) -> tuple[Tensor, StepStats]:
        loss, stats = self.objective(batch, K, weights, counts)
        # a rank whose pack has no row to learn from must still take part in the reduction
        (loss if loss.requires_grad else loss + 0.0 * self.model.norm.weight.sum()).backward()
        return loss.detach(), stats

    def update(self, lr: float, clip: float) -> Tensor:
        norm = super().update(lr, clip)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    @contextmanager
    def whole(self) -> Iterator[Drafter]:
        self.objective.unshard()  # type: ignore[operator]
        try:
            yield self.model
        finally:
            self.objective.reshard()  # type: ignore[operator]
