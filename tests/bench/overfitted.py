"""Tiny random targets with drafters overfitted to their greedy answers: pairs whose acceptance is high, made in seconds.

What they draft is worth nothing; that prediction and engine count the same of it is what is tested.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from conftest import write_byte_tokenizer
from draftsmith.contract import Contract
from draftsmith.dialects import vllm
from draftsmith.dialects.checkpoint import Checkpoint
from draftsmith.drafter.model import Drafter
from draftsmith.extract.transformers_backend import TransformersStates
from draftsmith.recipe import DrafterSection, TrainSection
from draftsmith.target.config import load_config, target_facts
from draftsmith.target.tokenizer import TargetTokenizer
from draftsmith.target.weights import read_embedding
from draftsmith.train.batch import join
from draftsmith.train.core import build
from draftsmith.train.data import to_document
from draftsmith.train.init import drafter_config, random_start, target_head
from draftsmith.train.objective import supervision

VOCAB, ROWS, ANSWER = 320, 16, 48


@dataclass(frozen=True)
class Answered:
    """One prompt with the target's own greedy answer."""

    row_id: str
    prompt: str
    token_ids: list[int]
    boundary: int
    source: str = "tiny"


def write_target(folder: Path, kind: str, seed: int = 0) -> Path:
    """A random model of 6 layers with a byte tokenizer. kind: llama, qwen3, deepseek_v3 (latent attention)."""
    import transformers as tf

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    if kind == "deepseek_v3":  # latent widths (512 + 64) that vLLM's kernels know; all layers dense
        sizes |= {"num_key_value_heads": 4, "head_dim": 64, "q_lora_rank": 32, "kv_lora_rank": 512, "v_head_dim": 32}
        sizes |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "first_k_dense_replace": 6, "n_routed_experts": 4}
        sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
        sizes |= {"topk_method": "noaux_tc"}
    config, model = {
        "llama": (tf.LlamaConfig, tf.LlamaForCausalLM),
        "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM),
        "deepseek_v3": (tf.DeepseekV3Config, tf.DeepseekV3ForCausalLM),
    }[kind]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = model(config(**sizes))
        with torch.no_grad():
            for p in made.parameters():
                p.normal_(0, 0.15) if p.dim() > 1 else p.uniform_(0.5, 1.5)
    made.eval().save_pretrained(folder)
    write_byte_tokenizer(folder, vocab_size=VOCAB)
    return folder


def prompts(count: int = ROWS) -> list[str]:
    return [f"What is {i} plus {7 * i % 11}?" for i in range(count)]


@torch.no_grad()
def answers(target: Path, some: list[str], tokens: int = ANSWER) -> list[Answered]:
    """Greedy answers of `tokens` tokens, end tokens not heeded."""
    tokenizer = TargetTokenizer.load(target)
    model = TransformersStates(target, [0]).model
    rows = []
    for i, text in enumerate(some):
        ids = tokenizer.render([{"role": "user", "content": text}])
        out = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=None
        )
        rows.append(Answered(f"tiny/{i}", text, out[0].tolist(), len(ids)))
    return rows


def overfit(
    target: Path,
    rows: list[Answered],
    folder: Path,
    *,
    form: str = "llama",
    steps: int = 200,
    K: int = 3,
    **switches: bool,
) -> Path:
    """A drafter trained on nothing but these rows, exported in the vLLM dialect (float32)."""
    facts = target_facts(target)
    n = facts.num_layers
    ids = [1, n // 2, n - 1]
    backend = TransformersStates(target, ids)
    states = [backend.states([r.token_ids], [r.boundary])[0] for r in rows]
    used = sorted({int(t) for s in states if s.argmax is not None for t in s.argmax})
    filler = [t for t in range(VOCAB) if t not in set(used)]
    chosen = torch.tensor(sorted(used + filler[: max(96 - len(used), 0)]))
    contract = Contract(target=facts, aux_layer_ids=ids, draft_vocab_size=len(chosen))
    section = DrafterSection.model_validate({"form": form} | switches)
    model = Drafter(drafter_config(section, load_config(target), contract))
    random_start(model, 0)
    t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    model.set_vocab(chosen - torch.arange(len(chosen)), t2d)
    model.attach_embedding(read_embedding(target).float())
    rms = torch.cat([s.aux.float().flatten(1) for s in states]).square().mean(0).sqrt().clamp(min=1e-6)
    batch = join([to_document(r.row_id, s, 1 / rms, torch.float32, 512) for r, s in zip(rows, states, strict=True)])
    core = build(model, target_head(target, chosen.tolist()), TrainSection(), hand=False)
    counts = supervision(batch, t2d, K).sum(1).clamp(min=1)
    for step in range(steps):
        core.step(batch, K, [0.8**s for s in range(K)], counts)
        core.update(4e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps) ** 0.5, 1.0)
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    tensors["fc.weight"] = tensors["fc.weight"] / rms
    vllm.write(Checkpoint(model.config, tensors), folder, dtype="float32")
    return folder


def predicted_and_measured(
    target: Path, drafter: Path, some: list[str], engine: Any, work: Path, K: int = 3
) -> dict[str, Any]:
    """{"predicted", "measured"}: acceptance per position by replay of the engine's own greedy answers, and as it counted.

    One request at a time and in float32, so that both sides read the same texts and round alike."""
    from draftsmith.bench.predict import engine_texts, predict
    from draftsmith.bench.run import VllmOpener, run_bench
    from draftsmith.bench.ways import Plan
    from draftsmith.capture.prompts import Prompt
    from draftsmith.ui import QuietUi

    asked = [Prompt(f"tiny-{i}", "tiny", [{"role": "user", "content": text}]) for i, text in enumerate(some)]
    plan = Plan({"tiny": asked}, [1], single_prompts=len(asked), single_max_tokens=ANSWER, extra={"ignore_eos": True})
    opener = VllmOpener(engine, target, drafter, K, work, QuietUi(), {"max_model_len": 256, "dtype": "float32"})
    bench = run_bench(plan, ["drafter"], opener, work, {"name": engine.name, "version": engine.version}, QuietUi())
    # the one-at-a-time pass is a mixture of all sets; here of one
    mixed = work / "ways" / "drafter" / "c1-mixed.json"
    (work / "ways" / "drafter" / "c1-tiny.json").write_text(mixed.read_text())
    found = predict(target, drafter, engine_texts(work / "ways" / "drafter", plan.prompts, target, 1), K)
    return {
        "predicted": found["acceptance_per_position"],
        "measured": bench["acceptance_per_position"],
        "drafts": bench["drafts"],
        "texts": found["texts"],
    }
