"""Acceptance of the demo's drafter over training seeds, in the real engine, with the offline prediction beside it.

    python benchmarks/demo_seeds.py --target T --drafters D0 D1 D2 --work DIR [--engine E] [--training sweep.jsonl]

Each drafter is one training seed on the same captured rows. The prompts are the first 40 of MT-bench, 20 of GSM8K and 20
of HumanEval (first turns), 128 tokens, temperature 0, three draft tokens, eight at once; ngram is measured beside the
first. Goes on where it was killed. `--training`: JSON lines of how each was trained, kept in the rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from _figures import write

from draftsmith.bench.predict import engine_texts, predict
from draftsmith.capture.prompts import load_prompts
from draftsmith.record import read_json, write_json

SETS = ("mt_bench:40", "gsm8k:20", "humaneval:20")
STEPS = 3
KEYS = ("tokens_per_target_step", "acceptance_length", "acceptance_per_position", "acceptance_conditional", "drafts")


def measure(target: Path, engine: Path | None, drafter: Path, out: Path, ways: str) -> dict[str, Any]:
    """`draftsmith bench` of one drafter; its bench.json."""
    command = [
        sys.executable,
        "-m",
        "draftsmith.cli.main",
        "bench",
        "--target",
        str(target),
        "--drafter",
        str(drafter),
    ]
    command += [w for s in SETS for w in ("--prompts", s)]
    command += ["--ways", ways, "--concurrency", "8", "--max-tokens", "128", "--out", str(out)]
    if engine:
        command += ["--engine", str(engine)]
    subprocess.run(command, check=True)
    found: dict[str, Any] = read_json(next(out.rglob("bench.json")))
    return found


def prediction(args: argparse.Namespace, drafter: Path, out: Path) -> dict[str, Any]:
    """The replay over the engine's own answers; kept in the work folder."""
    kept = out / "predicted.json"
    if not kept.exists():
        way = next(out.rglob("c8-mt_bench.json")).parent
        texts = engine_texts(
            way.parent / "drafter", {s.partition(":")[0]: load_prompts(s) for s in SETS}, args.target, 8
        )
        write_json(kept, predict(args.target, drafter, texts, STEPS))
    found: dict[str, Any] = read_json(kept)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafters", type=Path, nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--training", type=Path)
    args = parser.parse_args()
    trained = [json.loads(line) for line in args.training.read_text().splitlines()] if args.training else []
    rows: list[dict[str, Any]] = []
    ngram: dict[str, Any] = {}
    version = None
    for i, drafter in enumerate(args.drafters):
        out = args.work / f"bench{i}"
        bench = measure(args.target, args.engine, drafter, out, "drafter,ngram" if i == 0 else "drafter")
        version = bench["engine"]["version"]
        ngram = ngram or bench["ways"].get("ngram", {})
        predicted = prediction(args, drafter, out)
        pairs = zip(bench["acceptance_per_position"], predicted["acceptance_per_position"], strict=True)
        rows.append(
            {"drafter": drafter.name}
            | {k: bench[k] for k in KEYS}
            | {"sets": {s: {k: v[k] for k in KEYS[:3]} for s, v in bench["sets"].items()}}
            | {"predicted": {k: predicted[k] for k in KEYS[:4]}}
            | {"largest_gap": round(max(abs(a - b) for a, b in pairs), 4)}
            | {"training": next((t for t in trained if t["name"] == drafter.name.removesuffix("-eagle3")), None)}
        )
    mean = sum(r["tokens_per_target_step"] for r in rows) / len(rows)
    first = sum(r["acceptance_per_position"][0] for r in rows) / len(rows)
    write(
        "demo_seeds",
        claim=f"tokens per target step, mean of {len(rows)} training seeds, against ngram on the same prompts; position 0 is "
        f"accepted at {first:.3f}; the offline prediction is within {max(r['largest_gap'] for r in rows):.3f} at each position",
        ours=round(mean, 4),
        theirs=ngram.get("tokens_per_target_step"),
        unit="tokens per target step",
        rows=rows,
        engine_version=version,
    )
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
