"""Claim: a drafter for a target whose class has no EAGLE-3 interface is made and served on the CPU, with the plain texts.

    python benchmarks/gemma3.py --engine /opt/vllm --out out/runs [--until capture]

Runs `draftsmith run` on the package's own recipe (recipes/gemma3.yaml: gemma-3-270m, a base model, raw completions) and
writes the figures of its bench. --until stops after a stage; call again to go on. The engine's counters give the
acceptance, its greedy texts with and without the drafter the rest; nothing is computed here. Speed is no part of it: the
stages may be run while the machine does other things.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import _figures

RECIPE = Path(__file__).parent.parent / "src" / "draftsmith" / "recipes" / "gemma3.yaml"
KEYS = ("tokens_per_target_step", "acceptance_length", "acceptance_per_position", "drafts", "lossless", "ties")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", default="")
    args = parser.parse_args()
    command = [str(Path(sys.executable).with_name("draftsmith")), "run", str(RECIPE)]
    command += ["--set", f"out={args.out.resolve()}", "--set", f"engine.path={args.engine}"]
    done = subprocess.run([*command, *(["--until", args.until] if args.until else [])], check=False)
    if done.returncode or args.until:
        sys.exit(done.returncode)
    run = args.out / "gemma3"
    bench = json.loads((run / "bench" / "bench.json").read_text())
    records = {p.parent.name: json.loads(p.read_text()) for p in run.glob("*/run.json")}
    row = {k: bench[k] for k in KEYS}
    _figures.write(
        "gemma3",
        claim="gemma-3-270m, whose class has no EAGLE-3 interface in the engine, served with a drafter made by recipes/gemma3.yaml: "
        "acceptance at position 0 (theirs: nothing, the engine alone refuses the pair)",
        ours=bench["acceptance_per_position"][0],
        theirs=None,
        unit="accepted per draft",
        rows=[row, {"stage_seconds": {name: r["seconds"] for name, r in records.items()}}],
        engine_version=bench["engine"]["version"],
    )
    print(row)
    sys.exit(0 if bench["lossless"] else 1)


if __name__ == "__main__":
    main()
