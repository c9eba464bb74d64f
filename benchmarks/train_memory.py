"""Claim: `draftsmith plan --stage train` forecasts the peak memory of training on a CPU within a tenth.

For each case a process of its own runs the train stage on random states of the demo's shape (SmolLM2-135M's sizes, a
random target), and its peak anonymous memory (mapped files not counted) is read every 20 ms; the forecast is made from
the same recipe and the same share of answer tokens. (For a GPU tests/test_plan.py compares the forecast with the
peaks that results/train_*.json hold.)

    python benchmarks/train_memory.py [--steps 4]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from _figures import write

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
ROW, ANSWER, ROWS = 256, 0.6, 40
CASES: tuple[dict[str, Any], ...] = (
    {"ttt_steps": 3},
    {"ttt_steps": 7},
    {"ttt_steps": 3, "batch_tokens": 4096},
    {"ttt_steps": 3, "vocab.size": 32000},
    {"ttt_steps": 3, "optimizer": "adamw-lean"},
    {"ttt_steps": 3, "recompute": True},
    {"ttt_steps": 7, "recompute": True},
)


def make_run(folder: Path, draft: int) -> Path:
    """A run whose earlier stages are done, with random states; returns its recipe."""
    import numpy as np
    import torch
    import yaml
    from safetensors.torch import save_file

    from draftsmith.capture.rows import Row, write_rows
    from draftsmith.contract import Contract
    from draftsmith.extract.codecs import make_codec
    from draftsmith.extract.states import States
    from draftsmith.extract.store import StateWriter
    from draftsmith.record import write_record
    from draftsmith.target.config import target_facts
    from draftsmith.vocab.map import VocabMap

    G, V = CONFIG["hidden_size"], CONFIG["vocab_size"]
    assert isinstance(G, int) and isinstance(V, int)
    target = folder / "target"
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(V, G) * 0.02, "model.norm.weight": torch.ones(G)}
    save_file({k: t.bfloat16() for k, t in tensors.items()}, str(target / "model.safetensors"), {"format": "pt"})
    facts = Contract(target=target_facts(target), aux_layer_ids=[2, 15, 27], final_state="pre_norm")
    run, boundary = folder / "runs/memory", round(ROW * (1 - ANSWER))
    for name in ("capture", "vocab", "extract"):
        (run / name).mkdir(parents=True)
        facts.save(run / name)
    ids = torch.randint(draft, (ROWS, ROW))
    write_rows(
        run / "capture",
        [Row(f"r{i}", f"r{i}", 0, 0, "x", ids[i].tolist(), boundary, "stop", "default", 0.7, 1.0, "t", "")
         for i in range(ROWS)],
    )  # fmt: skip
    VocabMap(np.zeros(draft, dtype=np.int64), np.arange(V) < draft).save(run / "vocab")
    n = ROW - boundary + 1
    with StateWriter(run / "extract", facts, make_codec("bf16")) as writer:
        for i in range(ROWS):
            aux, final = torch.randn(ROW, 3, G).bfloat16(), torch.randn(n, G).bfloat16()
            choice = torch.randint(draft, (n,))
            writer.add(f"r{i}", States(ids[i], boundary, aux, boundary - 1, final, choice))
    counts = {"rows": ROWS, "tokens": ROWS * ROW, "supervised": ROWS * (ROW - boundary)}
    for name in ("capture", "vocab", "extract"):
        result = {"output_hash": name, **(counts if name == "extract" else {})}
        write_record(run / name, stage=name, key=name, inputs={}, config={}, result=result, started=time.time())
    recipe = folder / "recipe.yaml"
    sections = {"name": "memory", "out": str(folder / "runs"), "target": {"model": str(target)},
                "capture": {"prompts": ["x.jsonl"]}, "vocab": {"size": draft}}  # fmt: skip
    recipe.write_text(yaml.safe_dump(sections))
    return recipe


def peak_of(command: list[str]) -> int:
    """Peak anonymous bytes of a process (it starts no others)."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    watched, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        try:
            memory = watched.memory_info()
            peak = max(peak, memory.rss - memory.shared)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return peak


def measure(case: dict[str, Any], steps: int) -> dict[str, Any]:
    draft = int(case.get("vocab.size", 8192))
    settings = {f"train.{k}": v for k, v in case.items() if "." not in k} | {
        "train.steps": steps, "train.eval_every": max(steps // 2, 1), "train.warm_fraction": 0, "train.held_out_rows": 0.2,
    }  # fmt: skip
    pairs = [x for k, v in settings.items() for x in ("--set", f"{k}={json.dumps(v)}")]
    with tempfile.TemporaryDirectory() as tmp:
        recipe = str(make_run(Path(tmp), draft))
        main = [sys.executable, "-m", "draftsmith.cli.main"]
        plan = subprocess.run(
            [*main, "plan", recipe, "--stage", "train", "--json", *pairs], capture_output=True, text=True, check=True
        )
        forecast = json.loads(plan.stdout)["stages"]["train"]["memory"]
        peak = peak_of([*main, "train", recipe, *pairs])
    parts = {k: round(v / 1e6, 1) for k, v in forecast.items() if k not in ("device", "fits")}
    return {
        "case": case,
        "peak_mb": round(peak / 1e6, 1),
        "forecast_mb": parts,
        "ratio": round(forecast["total"] / peak, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    parser.add_argument("--cases", default="", help="numbers of cases, comma between; all if not given")
    given = parser.parse_args()
    chosen = [CASES[int(i)] for i in given.cases.split(",")] if given.cases else list(CASES)
    rows = []
    for case in chosen:
        rows.append(measure(case, given.steps))
        print(json.dumps(rows[-1]), flush=True)
    held = sum(abs(r["ratio"] - 1) <= 0.1 for r in rows)
    if not given.dry:
        write(
            "train_memory",
            claim="the forecast of plan --stage train is within a tenth of the peak memory measured on a CPU",
            ours=held,
            theirs=len(rows),
            unit="cases within a tenth",
            rows=rows,
        )
    raise SystemExit(0 if held == len(rows) else 1)


if __name__ == "__main__":
    main()
