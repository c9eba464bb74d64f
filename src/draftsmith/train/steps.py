"""One forward and backward pass, whoever computes it: the reference in autograd, or the fused step.

A step takes a packed batch and leaves the gradients in the parameters' `.grad` (added to what is there), so that the
loop, the optimizer and the tests do not know which one ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from draftsmith.drafter.model import Drafter
from draftsmith.recipe import TrainSection
from draftsmith.train.batch import StepBatch
from draftsmith.train.fused.adamw import FusedAdamW
from draftsmith.train.fused.layout import FlatParams
from draftsmith.train.fused.step import FusedStep
from draftsmith.train.objective import StepStats, TargetHead, reference_loss
from draftsmith.train.optim import MasterAdamW, Optimizer


class TrainStep(Protocol):
    """(batch, K, weights w_s, rows per step of the whole optimizer step) → (loss, figures); gradients in `.grad`."""

    def __call__(
        self, batch: StepBatch, K: int, weights: Sequence[float], counts: Tensor
    ) -> tuple[Tensor, StepStats]: ...


class ReferenceStep:
    """The objective in plain autograd. recompute: each draft step is computed again in the backward pass instead of
    being kept, so memory does not grow with K (gradient checkpointing)."""

    def __init__(self, model: Drafter, head: TargetHead | None, recompute: bool = False) -> None:
        self.model, self.head, self.recompute = model, head, recompute

    def __call__(self, batch: StepBatch, K: int, weights: Sequence[float], counts: Tensor) -> tuple[Tensor, StepStats]:
        loss, stats = reference_loss(self.model, batch, K, weights, self.head, counts, recompute=self.recompute)
        if loss.requires_grad:
            loss.backward()
        return loss.detach(), stats


class HandStep:
    """The hand-differentiated step of fused/: the same loss and gradients, several times faster. The model's
    parameters and gradients are views of its flat buffers (`FlatParams.bind`)."""

    def __init__(self, fused: FusedStep) -> None:
        self.fused = fused

    def __call__(self, batch: StepBatch, K: int, weights: Sequence[float], counts: Tensor) -> tuple[Tensor, StepStats]:
        return self.fused.loss_and_grads(batch, self.fused.plan(batch, K), weights, counts)


class FlatOptimizer:
    """fused.adamw over the flat buffers, as the loop wants it."""

    def __init__(self, adam: FusedAdamW) -> None:
        self.adam = adam

    def step(self, lr: float, clip: float) -> Tensor:
        self.adam.clip = clip
        return self.adam.step(lr)

    def state(self) -> dict[str, Tensor]:
        return self.adam.state_dict()

    def load(self, state: dict[str, Tensor]) -> None:
        self.adam.load_state_dict(state)


def build(
    model: Drafter, head: TargetHead | None, section: TrainSection, *, hand: bool = True
) -> tuple[TrainStep, Optimizer]:
    """Step and optimizer for a model that is on its device, in its type, with its weights and embedding.

    The hand-written step serves the Llama form; the MLA form (and `hand=False`) runs the reference in autograd."""
    if not hand or model.config.form != "llama":
        adam = MasterAdamW(model.trained(), section.betas, section.weight_decay)
        return ReferenceStep(model, head), adam
    weight = model.fc.weight
    own = model.embed_tokens is not None and model.embed_tokens.weight.requires_grad
    flat = FlatParams(model.config, weight.device, weight.dtype, train_embedding=own)
    flat.load(dict(model.named_parameters()))
    flat.bind(model)
    table = model.lent_embedding if model.embed_tokens is None else model.embed_tokens.weight.detach()
    fused = FusedStep(flat, head, table, model.t2d)
    flat_adam = FusedAdamW(
        flat,
        betas=section.betas,
        weight_decay=section.weight_decay,
        clip=section.clip,
        lean=section.optimizer == "adamw-lean",
    )
    return HandStep(fused), FlatOptimizer(flat_adam)
