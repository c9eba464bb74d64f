"""Makes a target of random weights and a drafter of its shape, as files that vLLM loads; for speed, not for sense.

    python benchmarks/_random_pair.py --out DIR --tokenizer MODEL --shape 8b --device cuda:0

DIR/target is a Qwen3 in bfloat16 (36 layers of width 4096 at shape 8b), DIR/drafter an EAGLE-3 drafter of the same width
with a draft vocab of 32,000 in draftsmith's own export. The tokenizer is borrowed, smaller than the vocabulary: lm_head
rows beyond it are zero, so that no answer holds an id without a text.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.dialects import vllm
from draftsmith.dialects.checkpoint import Checkpoint, tensor_shapes
from draftsmith.drafter.config import DrafterConfig

STD = 0.02
PER_FILE = 4
"""Layers of one file: about 1.5 GB at shape 8b."""


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    draft_vocab: int


SHAPES = {
    "8b": Shape(4096, 36, 32, 8, 128, 12288, 151936, 32000),  # Qwen3-8B
    "tiny": Shape(128, 8, 4, 2, 64, 256, 49152, 1024),
}


class Maker:
    """Random tensors of one device, one after another from one seed."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return made.normal_(0.0, STD, generator=self.generator).cpu()


def layer(maker: Maker, s: Shape, i: int) -> dict[str, Tensor]:
    """The tensors of target layer i."""
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    shapes = {
        "self_attn.q_proj": (q, s.hidden),
        "self_attn.k_proj": (kv, s.hidden),
        "self_attn.v_proj": (kv, s.hidden),
        "self_attn.o_proj": (s.hidden, q),
        "mlp.gate_proj": (s.inter, s.hidden),
        "mlp.up_proj": (s.inter, s.hidden),
        "mlp.down_proj": (s.hidden, s.inter),
    }
    norms = {
        "self_attn.q_norm": s.head_dim,
        "self_attn.k_norm": s.head_dim,
        "input_layernorm": s.hidden,
        "post_attention_layernorm": s.hidden,
    }
    made = {f"model.layers.{i}.{n}.weight": maker.normal(*shape) for n, shape in shapes.items()}
    return made | {f"model.layers.{i}.{n}.weight": torch.ones(w, dtype=torch.bfloat16) for n, w in norms.items()}


def parts(maker: Maker, s: Shape, words: int) -> Iterator[dict[str, Tensor]]:
    """The target's tensors, a file's worth at a time."""
    head = maker.normal(s.vocab, s.hidden)
    head[words:] = 0
    yield {"lm_head.weight": head, "model.norm.weight": torch.ones(s.hidden, dtype=torch.bfloat16)}
    yield {"model.embed_tokens.weight": maker.normal(s.vocab, s.hidden)}
    for start in range(0, s.layers, PER_FILE):
        some: dict[str, Tensor] = {}
        for i in range(start, min(start + PER_FILE, s.layers)):
            some |= layer(maker, s, i)
        yield some


def make_target(out: Path, s: Shape, tokenizer: Path, maker: Maker) -> None:
    """Write the target; its config.json last."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    words = len(vocabulary["model"]["vocab"])
    index: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool:
        writing: list[Future[None]] = []
        for number, tensors in enumerate(parts(maker, s, words)):
            file = f"model-{number:05d}.safetensors"
            index |= dict.fromkeys(tensors, file)
            writing.append(pool.submit(save_file, tensors, out / file, {"format": "pt"}))
            if len(writing) > 4:  # no more in memory than is being written
                writing.pop(0).result()
        for w in writing:
            w.result()
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.inter,
        "vocab_size": s.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))


def make_drafter(out: Path, s: Shape, maker: Maker) -> None:
    """Write the drafter: random weights, the first ids of the vocabulary as its draft vocab."""
    config = DrafterConfig(
        hidden_size=s.hidden,
        target_hidden_size=s.hidden,
        aux_layer_ids=[2, s.layers // 2, s.layers - 3],
        vocab_size=s.vocab,
        draft_vocab_size=s.draft_vocab,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        intermediate_size=s.inter,
        rms_norm_eps=1e-6,
        rope={"rope_theta": 1000000.0, "rope_type": "default"},
        max_position_embeddings=40960,
    )
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        if name == "d2t":
            tensors[name] = torch.zeros(shape, dtype=torch.int64)
        elif name == "t2d":
            tensors[name] = torch.arange(s.vocab) < s.draft_vocab
        else:
            tensors[name] = maker.normal(*shape) if len(shape) > 1 else torch.ones(shape, dtype=torch.bfloat16)
    vllm.write(Checkpoint(config, tensors), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    shape, maker = SHAPES[args.shape], Maker(args.device)
    make_drafter(args.out / "drafter", shape, maker)
    make_target(args.out / "target", shape, args.tokenizer, maker)


if __name__ == "__main__":
    main()
