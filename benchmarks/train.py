"""The optimizer step beside the peers' own, both sides in one run on one GPU: results/train_<shape>.json.

    python benchmarks/train.py --out benchmarks/results [--figures NAME…] [--raw FILE]

Needs one Hopper-class GPU and the peers importable beside draftsmith:

    pip install specforge==0.2.0 speculators==0.9.0

Every configuration is a process (train_ours.py, train_peers.py) that imports and compiles beside others and is timed
alone. Single results are appended to the raw file as they come; with `--raw FILE --collect` the figures are made from
an earlier run's file without a GPU.

`--beside` measures the other peer instead: speculators 0.9.0 at shapes A and B, which trains no lm_head and makes its
teacher over the draft vocab alone, and ours (which does train it) with the first choice given: results/train_speculators.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GPU_GIB = 125
"""What the processes that run side by side may hold together."""

# figure: shape, K, tokens, documents, share supervised; the ratio asked for
FIGURES: dict[str, tuple[str, int, int, int, float, float]] = {
    "train_A_K7_2048": ("A", 7, 2048, 1, 1.0, 1.5),
    "train_A_K3_2048": ("A", 3, 2048, 1, 1.0, 1.5),
    "train_A_K7_4096": ("A", 7, 4096, 1, 1.0, 1.3),
    "train_B_K7_4096": ("B", 7, 4096, 1, 1.0, 1.5),
    "train_B_K3_4096": ("B", 3, 4096, 1, 1.0, 1.5),
    "train_C_K3_8x1024": ("C", 3, 1024, 8, 1.0, 2.5),
    "train_A_K7_2048_masked40": ("A", 7, 2048, 1, 0.4, 1.5),
}


@dataclass
class Job:
    """A process: script and arguments, the GPU memory it may hold."""

    args: list[str]
    gib: int
    process: subprocess.Popen[bytes] | None = None


def jobs(names: list[str]) -> list[Job]:
    """What the figures need: per shape the anchor in both forms, the other peer, and ours with the first choice found
    within the step, with the lean optimizer, and with the first choice given. Most memory first; the anchor's wrapped
    form reserves far more than it uses."""
    found: list[Job] = []
    memory = {"A": (73, 45, 55, 32), "B": (31, 24, 23, 14), "C": (9, 9, 4, 3)}
    for shape, (wrapped, plain, speculators, ours) in memory.items():
        figures = [FIGURES[n] for n in names if FIGURES[n][0] == shape]
        runs = ",".join(f"{K}:{length}:{docs}" + (f":{s}" if s < 1 else "") for _, K, length, docs, s, _ in figures)
        if not runs:
            continue
        peers, mine = str(HERE / "train_peers.py"), str(HERE / "train_ours.py")
        graph = ["graph=1"] if shape == "C" else []
        found += [
            Job([peers, "specforge", shape, runs, "wrap=1"], wrapped),
            Job([peers, "specforge", shape, runs, "wrap=0"], plain),
            *(
                Job([mine, shape, runs, *graph, *options], ours)
                for options in (["teacher=full"], ["teacher=full", "lean=1"], ["teacher=stored"])
            ),
            Job([peers, "speculators", shape, runs], speculators),
        ]
    return [*sorted(found, key=lambda j: "speculators" in j.args), Job([str(HERE / "train_same.py")], 6)]


BESIDE = {"train_A_K7_2048": 45, "train_A_K3_2048": 31, "train_B_K7_4096": 21, "train_B_K3_4096": 14}
"""Figure → GiB of speculators' process there (it compiles for a minute or more, so each configuration has its own)."""


def beside_jobs() -> list[Job]:
    found = []
    for name, gib in BESIDE.items():
        shape, K, length, docs, _, _ = FIGURES[name]
        found.append(Job([str(HERE / "train_peers.py"), "speculators", shape, f"{K}:{length}:{docs}"], gib))
    for shape, gib in (("A", 32), ("B", 14)):
        runs = ",".join("{1}:{2}:{3}".format(*FIGURES[n]) for n in BESIDE if FIGURES[n][0] == shape)
        found.append(Job([str(HERE / "train_ours.py"), shape, runs, "teacher=stored"], gib))
    return found


def collect_beside(raw: Path, out: Path, commit: str) -> None:
    """train_speculators.json from a raw file of `--beside`."""
    rows = [json.loads(line) for line in raw.read_text().splitlines()]
    top = next(r for r in reversed(rows) if r["side"] == "ceiling")
    table: list[dict[str, Any]] = []
    for name in BESIDE:
        mine = [r for r in rows if matches(r, FIGURES[name])]
        ours, theirs = ([r for r in mine if r["side"] == side] for side in ("ours", "speculators"))
        if ours and theirs:
            a, b = ours[-1], theirs[-1]
            table.append({"what": name, "ours": a["tok_s"], "theirs": b["tok_s"], "ratio": round(a["tok_s"] / b["tok_s"], 3),
                          "peak_gib": [a["peak_gib"], b["peak_gib"]], "peak_ratio": round(a["peak_gib"] / b["peak_gib"], 3)})  # fmt: skip
    if not table:
        print("train_speculators: incomplete, not written", flush=True)
        return
    record = {
        "claim": "tokens/s of one optimizer step beside speculators 0.9.0, which trains no lm_head (ours does; first choice given)",
        "command": "python benchmarks/train.py --beside --out benchmarks/results",
        "machine": f"one {top['gpu']}",
        "versions": top["versions"],
        "date": date.today().isoformat(),
        "commit": commit,
        "ours": table[0]["ours"],
        "theirs": table[0]["theirs"],
        "unit": "target tokens/s",
        "ratio": table[0]["ratio"],
        "rows": [*table, *(r for r in rows if r["side"] in ("ours", "speculators"))],
    }
    (out / "train_speculators.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(table), flush=True)


def ceiling() -> dict[str, Any]:
    """Rate of an 8192-cubed bf16 product on random data: groups of ten, then 600 in a row."""
    code = """
import json, statistics, torch
g = torch.Generator(device="cuda").manual_seed(1)
a, b = (torch.randn(8192, 8192, device="cuda", generator=g).bfloat16() for _ in range(2))
def rate(n):
    e = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    e[0].record()
    for _ in range(n): torch.matmul(a, b)
    e[1].record(); torch.cuda.synchronize()
    return round(2 * 8192**3 * n / e[0].elapsed_time(e[1]) / 1e9, 1)
rate(5)
groups = [rate(10) for _ in range(7)]
print(json.dumps({"side": "ceiling", "tflops": statistics.median(groups), "groups": groups, "sustained_600": rate(600),
                  "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
"""
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def run(raw: Path, seconds: float, names: list[str] | None) -> None:
    """All jobs, as many side by side as fit into memory and cores; results go to `raw` line by line."""
    deadline = time.time() + seconds
    with raw.open("a") as f:
        f.write(json.dumps(ceiling() | {"versions": versions()}) + "\n")
    waiting, running = beside_jobs() if names is None else jobs(names), list[Job]()
    logs = raw.with_suffix(".log")
    while waiting or running:
        for job in [j for j in running if j.process and j.process.poll() is not None]:
            running.remove(job)
            print(f"rc {job.process.returncode if job.process else None}: {' '.join(job.args)}", flush=True)
        for job in list(waiting):
            if time.time() > deadline:
                waiting.remove(job)
                print("left out for want of time:", " ".join(job.args), flush=True)
            elif len(running) < 6 and sum(j.gib for j in running) + job.gib <= GPU_GIB:
                waiting.remove(job)
                port = str(29500 + len(waiting))
                env = os.environ | {"MASTER_PORT": port, "DEADLINE": str(deadline), "PYTHONUNBUFFERED": "1"}
                with logs.open("ab") as log:
                    job.process = subprocess.Popen(
                        [sys.executable, *job.args, f"out={raw}"], stdout=log, stderr=subprocess.STDOUT, env=env
                    )
                running.append(job)
        if time.time() > deadline + 25:
            for job in running:
                if job.process:
                    job.process.kill()
        time.sleep(0.5)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "specforge", "speculators"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unpacked wheel"
    return found


def matches(row: dict[str, Any], figure: tuple[str, int, int, int, float, float]) -> bool:
    shape, K, length, docs, share, _ = figure
    return (
        (row.get("shape"), row.get("K"), row.get("length"), row.get("documents")) == (shape, K, length, docs)
        and float(row.get("options", {}).get("mask", 1.0)) == share
        and "tok_s" in row
    )  # fmt: skip


def collect(raw: Path, out: Path, commit: str) -> None:
    """The figures' files from a raw file."""
    rows = [json.loads(line) for line in raw.read_text().splitlines()]
    top = [r for r in rows if r["side"] == "ceiling"][-1]
    same = [r for r in rows if r["side"] == "same"]
    for name, figure in FIGURES.items():
        mine = [r for r in rows if matches(r, figure)]
        theirs = [r for r in mine if r["side"] == "specforge"]
        like = [r for r in mine if r["side"] == "ours" and r["options"].get("teacher") == "full"]
        default = [r for r in like if "lean" not in r["options"]]
        lean = [r for r in like if "lean" in r["options"]]
        if not theirs or not default:
            print(f"{name}: incomplete, not written", flush=True)
            continue
        best, ours = max(theirs, key=lambda r: r["tok_s"]), default[-1]
        small = min(theirs, key=lambda r: r["peak_gib"])
        peaks: list[dict[str, Any]] = [
            {
                "what": f"peak memory, {kind}",
                "unit": "GiB max_memory_allocated",
                "ours": r["peak_gib"],
                "theirs": small["peak_gib"],
                "ratio": round(r["peak_gib"] / small["peak_gib"], 3),
                "at_most": bar,
            }
            for kind, found, bar in (("default", default, 0.85), ("lean optimizer", lean, 0.6))
            for r in found[-1:]
        ]
        share = {
            "what": "executed matrix products over the 8192-cubed product's rate",
            "ours": round(ours["executed_tflops"] / top["tflops"], 3),
            "ceiling_tflops": top["tflops"],
            "sustained_tflops": top["sustained_600"],
        }
        record = {
            "claim": f"tokens/s of one optimizer step against SpecForge 0.2.0 (faster of wrapped and unwrapped; trained "
            f"lm_head, first choice of the full vocabulary found within the step on both sides): at least {figure[5]}x",
            "command": "python benchmarks/train.py --out benchmarks/results",
            "machine": f"one {top['gpu']}",
            "versions": top["versions"],
            "date": date.today().isoformat(),
            "commit": commit,
            "ours": ours["tok_s"],
            "theirs": best["tok_s"],
            "unit": "target tokens/s",
            "ratio": round(ours["tok_s"] / best["tok_s"], 3),
            "rows": [*peaks, share, *mine, *same[-1:]],
        }
        (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        memory = ", ".join(f"{p['ratio']}" for p in peaks)
        print(f"{name}: {ours['tok_s']} / {best['tok_s']} = {record['ratio']}; memory {memory}; share {share['ours']}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=HERE / "results")
    p.add_argument("--raw", type=Path, default=Path("train_raw.jsonl"))
    p.add_argument("--seconds", type=float, default=900, help="no new process is begun after this")
    p.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="NAME")
    p.add_argument("--beside", action="store_true", help="speculators at shapes A and B, beside ours")
    p.add_argument("--collect", action="store_true", help="make the figures from --raw, run nothing")
    p.add_argument("--commit", help="commit to name; none = git's")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    if not a.collect:
        run(a.raw, a.seconds, None if a.beside else a.figures)
    head = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = a.commit or subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    (collect_beside if a.beside else collect)(a.raw, a.out, commit)


if __name__ == "__main__":
    main()
