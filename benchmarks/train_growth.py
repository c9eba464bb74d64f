"""How the training step grows with context length and draft steps, on one GPU: results/train_growth.json.

    python benchmarks/train_growth.py --out benchmarks/results [--shapes A C] [--raw FILE] [--collect --commit HASH]

One document of 2k, 8k and 32k tokens, K = 1, 3, 7, all positions supervised; bf16, float32 masters; per shape also with
8-bit moments where the default does not fit. `ours` is the rate at the first shape, 32k tokens and K 7: that it is there
at all is the claim. Single measurements come from train_ours.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from train import versions

HERE = Path(__file__).parent
LENGTHS = (2048, 8192, 32768)
STEPS = (1, 3, 7)


def measure(shapes: list[str], raw: Path) -> None:
    """One process per shape; what does not fit the GPU ends the process, and the rows before it are kept."""
    import torch

    name = torch.cuda.get_device_name()
    with raw.open("a") as f:
        f.write(json.dumps({"side": "machine", "gpu": name, "versions": versions()}) + "\n")
    runs = ",".join(f"{K}:{n}:1" for n in LENGTHS for K in STEPS)
    for shape in shapes:
        command = [sys.executable, str(HERE / "train_ours.py"), shape, runs, "teacher=stored", f"out={raw}"]
        done = subprocess.run([*command, "warm=2", "timed=4"], check=False, cwd=HERE)
        print(f"shape {shape}: exit {done.returncode}", flush=True)


def collect(raw: Path, out: Path, commit: str | None, shapes: list[str]) -> dict[str, Any]:
    """The figure's file from a raw file."""
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    machine = [r for r in lines if r["side"] == "machine"][-1]
    rows = [r for r in lines if r["side"] == "ours" and r["shape"] in shapes and r["length"] in LENGTHS]
    longest = [r for r in rows if (r["shape"], r["length"], r["K"]) == (shapes[0], LENGTHS[-1], STEPS[-1])]
    table = [
        {
            "shape": r["shape"],
            "tokens": r["length"],
            "K": r["K"],
            "tok_s": r["tok_s"],
            "ms": r["ms"],
            "peak_gib": r["peak_gib"],
        }
        for r in rows
    ]
    record = {
        "claim": f"32k tokens of context at shape {shapes[0]} with K = 7 train on one GPU; rates at 2k, 8k, 32k and K = 1, 3, 7",
        "command": "python benchmarks/train_growth.py --out benchmarks/results",
        "machine": f"one {machine['gpu']}",
        "versions": machine["versions"],
        "date": date.today().isoformat(),
        "commit": commit,
        "ours": longest[-1]["tok_s"] if longest else None,
        "theirs": None,
        "unit": "target tokens/s",
        "ratio": None,
        "rows": table,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "train_growth.json").write_text(json.dumps(record, indent=1) + "\n")
    for row in table:
        print("{shape} {tokens:6} tokens, K {K}: {tok_s:8} tok/s, {ms:9} ms, peak {peak_gib} GiB".format(**row))
    return record


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=HERE / "results")
    p.add_argument("--raw", type=Path, default=Path("train_growth_raw.jsonl"))
    p.add_argument("--shapes", nargs="+", default=["A", "C"])
    p.add_argument("--collect", action="store_true", help="make the figure from --raw, run nothing")
    p.add_argument("--commit", help="commit to name")
    a = p.parse_args()
    raw = a.raw.resolve()
    if not a.collect:
        measure(a.shapes, raw)
    collect(raw, a.out.resolve(), a.commit, a.shapes)


if __name__ == "__main__":
    main()
