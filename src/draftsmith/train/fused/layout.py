"""All trained numbers in one flat buffer, all their gradients in another.

One buffer makes the optimizer one kernel, the gradient norm one reduction and a data-parallel reduction one call.
Every tensor of drafter/config.py is a view into it under its native name; tensors that one product reads together
(q/k/v, gate/up, the norms of the aux states) lie behind each other, so that their union is a view too.

Matrices come first, vectors (norms, biases) last: weight decay is "index below `decayed`". Every group starts at a
multiple of 256 elements, so that a block of 256 (the lean optimizer's unit) never spans two groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafter.config import DrafterConfig

BLOCK = 256
_ATTN = "layers.0.self_attn."


def _groups(c: DrafterConfig, train_embedding: bool) -> list[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    """(group, [(native name, shape)]): the members of a group lie behind each other without a gap."""
    H, G, A, D, F = c.hidden_size, c.target_hidden_size, c.num_aux_layers, c.draft_vocab_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    mlp = "layers.0.mlp."
    matrices: list[tuple[str, list[tuple[str, tuple[int, ...]]]]] = [
        ("fc", [("fc.weight", (H, A * G))]),
        ("qkv", [(f"{_ATTN}{n}_proj.weight", (w, 2 * H)) for n, w in (("q", q), ("k", kv), ("v", kv))]),
        ("o", [(f"{_ATTN}o_proj.weight", (H, q))]),
        ("gate_up", [(f"{mlp}gate_proj.weight", (F, H)), (f"{mlp}up_proj.weight", (F, H))]),
        ("down", [(f"{mlp}down_proj.weight", (H, F))]),
        ("lm_head", [("lm_head.weight", (D, H))]),
    ]
    if train_embedding:
        matrices.append(("embedding", [("embed_tokens.weight", (c.vocab_size, H))]))
    norms = ("norm", "layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm")
    vectors: list[tuple[str, list[tuple[str, tuple[int, ...]]]]] = []
    for name in norms:
        vectors.append((name.removeprefix("layers.0."), [(f"{name}.weight", (H,))]))
    if c.norms.norm_before_fc:
        vectors.append(("input_norm", [("input_norm.weight", (A * G,))]))
    if c.norms.fc_norm:
        vectors.append(("fc_norm", [(f"fc_norm.{a}.weight", (G,)) for a in range(A)]))
    if c.attention_bias:
        vectors.append(("qkv_bias", [(f"{_ATTN}{n}_proj.bias", (w,)) for n, w in (("q", q), ("k", kv), ("v", kv))]))
        vectors.append(("o_bias", [(f"{_ATTN}o_proj.bias", (H,))]))
    return matrices + vectors


@dataclass
class FlatRegion:
    """Flat parameters and their gradients [numel]; elements below `decayed` are matrices."""

    param: Tensor
    grad: Tensor
    numel: int
    decayed: int


class FlatParams(FlatRegion):
    """Weights and gradients of a Llama-form drafter.

    param, grad: flat buffers of `dtype` [numel]; named, grads: views by native name; w, g: views of the groups (a
    group of matrices as one matrix). decayed: elements below this index are matrices. `multiple`: numel is rounded up
    to it (ranks of a sharded optimizer x BLOCK).

    hidden: elements below this index are the hidden matrices, all but lm_head and embedding; with `split` it is a multiple
    of `multiple` too, so that ranks can share what lies on either side. hidden_names: those matrices.
    """

    def __init__(
        self,
        config: DrafterConfig,
        device: torch.device | str,
        dtype: torch.dtype,
        train_embedding: bool = False,
        multiple: int = BLOCK,
        split: bool = False,
    ) -> None:
        if config.form != "llama":
            raise ValueError(f"the fused step knows the llama form, not {config.form!r}")
        self.config, self.train_embedding = config, train_embedding
        spans: list[tuple[str, int, list[tuple[str, tuple[int, ...]]]]] = []
        offset = self.decayed = 0
        self.hidden_names: list[str] = []
        for group, members in _groups(config, train_embedding):
            if group == "lm_head":
                offset = self.hidden = -(-offset // multiple) * multiple if split else offset
                self.hidden_names = [name for _, _, found in spans for name, _ in found]
            spans.append((group, offset, members))
            size = sum(_size(shape) for _, shape in members)
            offset += -(-size // BLOCK) * BLOCK
            if len(members[0][1]) > 1:
                self.decayed = offset
        self.numel = -(-offset // multiple) * multiple
        self.param = torch.zeros(self.numel, device=device, dtype=dtype)
        self.grad = torch.zeros(self.numel, device=device, dtype=dtype)
        self.named: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        self.w: dict[str, Tensor] = {}
        self.g: dict[str, Tensor] = {}
        for group, start, members in spans:
            at = start
            for name, shape in members:
                self.named[name] = self.param[at : at + _size(shape)].view(shape)
                self.grads[name] = self.grad[at : at + _size(shape)].view(shape)
                at += _size(shape)
            whole = (-1, *members[0][1][1:])
            self.w[group], self.g[group] = self.param[start:at].view(whole), self.grad[start:at].view(whole)

    def regions(self) -> tuple[FlatRegion, FlatRegion]:
        """The hidden matrices, and the rest."""
        n = self.hidden
        return (
            FlatRegion(self.param[:n], self.grad[:n], n, n),
            FlatRegion(self.param[n:], self.grad[n:], self.numel - n, self.decayed - n),
        )

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy every weight in; ValueError if one is missing or misshapen."""
        for name, view in self.named.items():
            if name not in weights:
                raise ValueError(f"weight {name} is missing")
            if weights[name].shape != view.shape:
                raise ValueError(f"{name} has shape {tuple(weights[name].shape)}, expected {tuple(view.shape)}")
        with torch.no_grad():
            for name, view in self.named.items():
                view.copy_(weights[name])

    def bind(self, module: torch.nn.Module) -> None:
        """Let a Drafter's parameters (and their .grad) be these views, so that it sees every optimizer step."""
        for name, p in module.named_parameters():
            if name in self.named:
                p.data, p.grad = self.named[name], self.grads[name]


def _size(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out
