"""Claim: over tiny random targets of many architectures, `check`'s gate says what the engine really does at load.

    python benchmarks/gate_observed.py --engine /opt/vllm --work out/gate [--seconds 200]

Targets are config.json files only; the engine fills the weights with random numbers (load_format dummy) and serves a
few tokens with an EAGLE-3 drafter. Observed: it served (yes), it said that it will not do so for this class (no), or
it failed for another reason (nothing is learned; the reason is kept in the rows and counted apart). Call again until
all are done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import _figures

from draftsmith.check.gate import INTERFACE, LIST
from draftsmith.check.types import Context, run_checks
from draftsmith.engine.find import find_engine

HERE = Path(__file__).parent
HIDDEN, LAYERS, VOCAB = 128, 8, 512
SMALL = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 256, "vocab_size": VOCAB, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1, "shared_expert_intermediate_size": 64,
       "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
MLA = {"kv_lora_rank": 512, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
       "num_key_value_heads": 4}  # fmt: skip
"""512 + 64: the one size that vLLM's kernels of latent attention know."""

TARGETS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("LlamaForCausalLM", "llama", {}),
    ("MistralForCausalLM", "mistral", {}),
    ("Qwen2ForCausalLM", "qwen2", {}),
    ("Qwen3ForCausalLM", "qwen3", {}),
    ("Qwen2MoeForCausalLM", "qwen2_moe", MOE),
    ("Qwen3MoeForCausalLM", "qwen3_moe", MOE),
    ("Phi3ForCausalLM", "phi3", {}),
    ("GemmaForCausalLM", "gemma", {}),
    ("Gemma2ForCausalLM", "gemma2", {}),
    ("Gemma3ForCausalLM", "gemma3_text", {}),
    ("GlmForCausalLM", "glm", {}),
    ("Glm4ForCausalLM", "glm4", {}),
    ("Glm4MoeForCausalLM", "glm4_moe", MOE),
    ("MixtralForCausalLM", "mixtral", MOE),
    ("OlmoForCausalLM", "olmo", {}),
    ("Olmo2ForCausalLM", "olmo2", {}),
    ("Olmo3ForCausalLM", "olmo3", {}),
    ("OlmoeForCausalLM", "olmoe", MOE),
    ("GraniteForCausalLM", "granite", {}),
    ("GraniteMoeForCausalLM", "granitemoe", MOE),
    ("CohereForCausalLM", "cohere", {}),
    ("Cohere2ForCausalLM", "cohere2", {}),
    ("StableLmForCausalLM", "stablelm", {}),
    ("Starcoder2ForCausalLM", "starcoder2", {}),
    ("GPTNeoXForCausalLM", "gpt_neox", {}),
    ("OPTForCausalLM", "opt", {"ffn_dim": 256, "word_embed_proj_dim": HIDDEN, "pad_token_id": 1}),
    ("FalconForCausalLM", "falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "head_dim": None}),
    ("BloomForCausalLM", "bloom", {"n_layer": LAYERS, "n_head": 4}),
    ("GPT2LMHeadModel", "gpt2", {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 512}),
    ("PersimmonForCausalLM", "persimmon", {}),
    ("PhiForCausalLM", "phi", {}),
    ("NemotronForCausalLM", "nemotron", {}),
    ("Exaone4ForCausalLM", "exaone4", {}),
    ("SmolLM3ForCausalLM", "smollm3", {}),
    ("ApertusForCausalLM", "apertus", {}),
    ("ArceeForCausalLM", "arcee", {}),
    ("SeedOssForCausalLM", "seed_oss", {}),
    ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", {}),
    ("Ernie4_5ForCausalLM", "ernie4_5", {}),
    ("DeepseekV2ForCausalLM", "deepseek_v2", MOE | MLA),
    ("DeepseekV3ForCausalLM", "deepseek_v3", MOE | MLA),
    (
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        MOE | {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    ("GptOssForCausalLM", "gpt_oss", MOE),
    ("Lfm2ForCausalLM", "lfm2", {"block_dim": HIDDEN, "block_ff_dim": 256, "conv_dim": HIDDEN, "conv_dim_out": HIDDEN}),
    ("MambaForCausalLM", "mamba", {"state_size": 16}),
    ("Qwen3NextForCausalLM", "qwen3_next", MOE),
    ("FalconH1ForCausalLM", "falcon_h1", {}),
    ("BambaForCausalLM", "bamba", {}),
)


def tiny_config(architecture: str, model_type: str, more: dict[str, Any]) -> dict[str, Any]:
    """transformers' own config of this type, made small."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {k: x for k, x in (SMALL | more).items() if x is not None}
    config = CONFIG_MAPPING[model_type](**sizes)
    return config.to_dict() | {"architectures": [architecture], "torch_dtype": "bfloat16"}


def drafter_config(latent: bool = False) -> dict[str, Any]:
    """In the Llama form, or the MLA form (the CPU's two kinds of cache have no common block size)."""
    form = MLA | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "head_dim": 64}
    return drafter_config() | form if latent else SMALL | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB, "target_hidden_size": HIDDEN, "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 6], "norm_before_residual": False, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    }  # fmt: skip


def prepare(work: Path) -> tuple[Path, list[str]]:
    """Write all configs and the list of jobs; returns (jobs, architectures that this transformers cannot make)."""
    jobs, lines, lost = work / "jobs.jsonl", [], []
    if jobs.exists():
        return jobs, lost
    drafters = {latent: work / f"drafter-{name}-eagle3" for latent, name in ((False, "llama"), (True, "mla"))}
    for latent, drafter in drafters.items():
        drafter.mkdir(parents=True, exist_ok=True)
        (drafter / "config.json").write_text(json.dumps(drafter_config(latent)))
    for architecture, model_type, more in TARGETS:
        folder = work / "targets" / architecture
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / "config.json").write_text(json.dumps(tiny_config(architecture, model_type, more), default=str))
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            lost.append(f"{architecture}: {type(e).__name__} {str(e)[:80]}")
            continue
        lines.append(json.dumps({
            "name": architecture, "model": str(folder), "prompt": [5, 7, 11], "max_tokens": 6,
            "speculative": {"model": str(drafters["kv_lora_rank" in more]), "method": "eagle3", "num_speculative_tokens": 2},
            "args": {"load_format": "dummy", "max_model_len": 256},
        }))  # fmt: skip
    jobs.write_text("\n".join(lines) + "\n")
    return jobs, lost


def predicted(folder: Path, engine: str) -> str:
    config = json.loads((folder / "config.json").read_text())
    rows = {r.id: r.status for r in run_checks(Context(target_config=config, engine_path=engine), groups=("gate",))}
    if "fail" in (rows[LIST], rows[INTERFACE]):
        return "no"
    return "yes" if rows[LIST] == rows[INTERFACE] == "pass" else "unknown"


REFUSALS = (
    "support EAGLE3 interface",
    "Target model does not have",  # the drafter's loader, before the interface is asked for
    "does not dispatch through the Transformers attention interface",
)
"""How the engine says that it will not serve EAGLE-3 for a target's class."""


def observed(result: dict[str, Any]) -> str:
    if result["reached"] == "done":
        return "yes"
    return "no" if any(text in (result.get("error") or "") for text in REFUSALS) else "other"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument(
        "--lock", nargs=1, default=[], help="take turns of SECONDS under this file's lock until all is done"
    )
    args = parser.parse_args()
    work = args.work.resolve()
    engine = find_engine(args.engine)
    jobs, lost = prepare(work)
    results_file = work / "results.jsonl"
    if args.seconds > 0:
        command = [
            str(engine.python),
            str(HERE / "engine_probe.py"),
            str(jobs),
            str(results_file),
            str(args.seconds),
            *args.lock,
        ]
        subprocess.run(command, check=True)
    results = {}
    if results_file.exists():
        results = {r["name"]: r for r in map(json.loads, results_file.read_text().splitlines())}
    names = [json.loads(x)["name"] for x in jobs.read_text().splitlines()]
    if left := [n for n in names if n not in results]:
        print(f"{len(results)} done, {len(left)} left: call again; not made: {lost}")
        return
    rows = []
    for name in names:
        saw = observed(results[name])
        row = {"architecture": name, "predicted": predicted(work / "targets" / name, args.engine), "observed": saw}
        if saw == "other":
            row |= {"reached": results[name]["reached"], "error": (results[name].get("error") or "")[:200]}
        rows.append(row)
    decided = [r for r in rows if r["observed"] != "other"]
    agree = [r for r in decided if r["predicted"] == r["observed"]]
    _figures.write(
        "gate_observed",
        claim=f"predicted = observed at load, over {len(decided)} architectures ({len(rows) - len(decided)} more failed "
        "for reasons of their own)",
        ours=len(agree),
        theirs=len(decided),
        unit="architectures",
        rows=rows,
        engine_version=engine.version,
    )
    print(
        f"{len(agree)} of {len(decided)} agree; other: {[r['architecture'] for r in rows if r['observed'] == 'other']}"
    )
    sys.exit(0 if len(agree) == len(decided) else 1)


if __name__ == "__main__":
    main()
