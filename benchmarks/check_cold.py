"""Claim: `draftsmith check` answers for a 1-trillion-parameter target of 61 layers and 64 shards in at most 1.5 s and
200 MB, in a new process.

    python benchmarks/check_cold.py --engine /opt/vllm [--runs 5]

The target and a drafter are made of sparse files: true headers and index, holes for the weights. Wall time is that of
`python -m draftsmith.cli.main check …`; memory is the process's peak resident size (an upper bound of the anonymous
memory, mapped files counted too).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _figures

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "mutants"))
import public_forms as forms
from tiny_pair import write_sparse

from draftsmith.check.headers import BITS
from draftsmith.engine.reader import read_engine

LAYERS, SHARDS, EXPERTS = 61, 64, 384
HIDDEN, EXPERT, DENSE, VOCAB = 7168, 2048, 18432, 163840


def target_tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Kimi-K2's inventory: MLA, one dense layer, 384 routed experts and one shared one in each of the others."""
    out = {
        "language_model.model.embed_tokens.weight": ("BF16", (VOCAB, HIDDEN)),
        "language_model.model.norm.weight": ("BF16", (HIDDEN,)),
        "language_model.lm_head.weight": ("BF16", (VOCAB, HIDDEN)),
    }
    for k in range(LAYERS):
        p = f"language_model.model.layers.{k}."
        a = p + "self_attn."
        out |= {
            p + "input_layernorm.weight": ("BF16", (HIDDEN,)),
            p + "post_attention_layernorm.weight": ("BF16", (HIDDEN,)),
            a + "q_a_proj.weight": ("BF16", (1536, HIDDEN)),
            a + "q_a_layernorm.weight": ("BF16", (1536,)),
            a + "q_b_proj.weight": ("BF16", (64 * 192, 1536)),
            a + "kv_a_proj_with_mqa.weight": ("BF16", (576, HIDDEN)),
            a + "kv_a_layernorm.weight": ("BF16", (512,)),
            a + "kv_b_proj.weight": ("BF16", (64 * 256, 512)),
            a + "o_proj.weight": ("BF16", (HIDDEN, 64 * 128)),
        }
        widths = [("mlp.", DENSE)] if k == 0 else [("mlp.shared_experts.", EXPERT)]
        widths += [] if k == 0 else [(f"mlp.experts.{e}.", EXPERT) for e in range(EXPERTS)]
        for name, wide in widths:
            out[p + name + "gate_proj.weight"] = out[p + name + "up_proj.weight"] = ("BF16", (wide, HIDDEN))
            out[p + name + "down_proj.weight"] = ("BF16", (HIDDEN, wide))
        if k:
            out[p + "mlp.gate.weight"] = ("BF16", (EXPERTS, HIDDEN))
    return out


def make(root: Path) -> tuple[Path, Path, int]:
    """(target, drafter, parameters)."""
    form = forms.FORMS["kimi_mla"]()
    target, drafter = form.write(root)
    tensors = target_tensors()
    names = list(tensors)
    shards = {n: i * SHARDS // len(names) for i, n in enumerate(names)}
    table = {n: f"model-{s + 1:05}-of-{SHARDS:06}.safetensors" for n, s in shards.items()}
    for s in range(SHARDS):
        part = {n: tensors[n] for n in names if shards[n] == s}
        write_sparse(target / f"model-{s + 1:05}-of-{SHARDS:06}.safetensors", part, BITS)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    total = 0
    for _, shape in tensors.values():
        n = 1
        for d in shape:
            n *= d
        total += n
    return target, drafter, total


def once(target: Path, drafter: Path, engine: str) -> dict[str, float | str]:
    command = [sys.executable, "-m", "draftsmith.cli.main", "check", str(target), str(drafter), "--engine", engine,
               "--tensor-parallel", "8", "--json"]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    text = child.stdout.read()
    _, _, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - started
    del before
    return {
        "seconds": round(wall, 3),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_mb": round(usage.ru_maxrss / 1000, 1),
        "verdict": json.loads(text)["verdict"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="check-cold-") as folder:
        target, drafter, parameters = make(Path(folder))
        rows = [once(target, drafter, args.engine) for _ in range(args.runs)]
    best = min(rows, key=lambda r: float(r["seconds"]))
    print(json.dumps({"parameters": parameters, "rows": rows}, indent=1))
    _figures.write(
        "check_cold",
        claim=f"check of a {LAYERS}-layer, {SHARDS}-shard, {parameters / 1e12:.2f}-trillion-parameter folder, cold: "
        "seconds of the fastest run (limit 1.5) and peak resident MB (limit 200)",
        ours=best["seconds"],
        theirs=None,
        unit="s",
        rows=rows,
        engine_version=read_engine(args.engine).version,
    )


if __name__ == "__main__":
    main()
