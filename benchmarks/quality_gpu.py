"""Everything of train_variants.py and quality_peers.py that trains, on one GPU (or several), side by side, within a time.

    python benchmarks/quality_gpu.py BUNDLE --target FOLDER --work W --out OUT [--seconds 320] [--gpus 0]

BUNDLE: quality_states.py pack. The peers' packages must be importable. Makes the states, trains our variants (three seeds)
and the peers' drafters in processes beside each other, then writes the figures codec_quality, start_layer and quality_peers
as soon as each can be written (they, every try and the logs are in OUT/quality.tar.xz too) and the drafters to serve
(OUT/drafters.00 …). What is not done in time is left out and said.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from quality_peers import SWEEPS

HERE = Path(__file__).parent
VARIANTS = ("bf16", "fp8-topk", "layer")
COMPARING = 60
"""Seconds kept for the comparisons at the end."""


def start(name: str, words: list[str], out: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    print(f"start {name}: {' '.join(words)}", flush=True)
    with (out / f"{name}.log").open("wb") as log:
        command = [sys.executable, str(HERE / words[0]), *words[1:]]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | env)


def run(name: str, words: list[str], out: Path, seconds: float) -> bool:
    """To its end, or killed; its output goes through."""
    process = start(name, words, out, {})
    try:
        code = process.wait(max(seconds, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    print((out / f"{name}.log").read_text(errors="replace")[-1500:], flush=True)
    print(f"{name}: rc {code}", flush=True)
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=320)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", default="0.001")
    parser.add_argument("--warm", default="0.5")
    parser.add_argument("--gpus", default="0", help="numbers, comma-separated: the peers go to the last")
    parser.add_argument("--peers", default="specforge,speculators")
    given = parser.parse_args()
    began = time.time()
    stop = began + given.seconds
    work, out, run_folder = given.work.resolve(), given.out.resolve(), given.work.resolve() / "run"
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    logs = work / "logs"
    logs.mkdir(exist_ok=True)
    gpus = given.gpus.split(",")
    training = ["train_variants.py", str(run_folder), "--work", str(work), "--steps", str(given.steps),
                "--lr", given.lr, "--warm", given.warm]  # fmt: skip
    threads = max(2, (os.cpu_count() or 2) // 8)
    deadline = stop - COMPARING
    common = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "DEADLINE": str(deadline - 5),
              "TORCHINDUCTOR_COMPILE_THREADS": "4"}  # fmt: skip
    jobs: dict[str, subprocess.Popen[bytes]] = {}
    made = work / "made"
    made.unlink(missing_ok=True)
    for peer in given.peers.split(",") if given.peers else []:
        for n, tries in enumerate(SWEEPS[peer]):
            words = [
                "quality_peers.py",
                "train",
                peer,
                str(run_folder),
                "--work",
                str(work),
                "--steps",
                str(given.steps),
            ]
            here = {"CUDA_VISIBLE_DEVICES": gpus[-1], "MASTER_PORT": str(29700 + len(jobs)), "WAIT": str(made)}
            jobs[f"{peer}-{n}"] = start(f"{peer}-{n}", [*words, "--tries", tries], logs, common | here)
    make = ["quality_states.py", "make", str(given.bundle), str(run_folder), "--target", str(given.target)]
    if not run("states", make, logs, 120):
        for process in jobs.values():
            process.kill()
        keep(work, logs, out, began)
        sys.exit(1)
    made.touch()
    for variant in VARIANTS:
        words = [*training, "--seeds", str(given.seeds), "--variants", variant, "--train-only"]
        jobs[variant] = start(variant, words, logs, common | {"CUDA_VISIBLE_DEVICES": gpus[0]})
    ours_done = False
    while jobs and time.time() < deadline:
        for name in [n for n, p in jobs.items() if p.poll() is not None]:
            print(f"{time.time() - began:.0f} s: {name} ended, rc {jobs.pop(name).returncode}", flush=True)
            print((logs / f"{name}.log").read_text(errors="replace")[-800:], flush=True)
        if not ours_done and not set(VARIANTS) & set(jobs):
            compare_variants(training, work, given.steps, logs, deadline - time.time())
            ours_done = True
            keep(work, logs, out, began)
        time.sleep(0.5)
    for name, process in jobs.items():
        print(f"{name}: out of time, ended", flush=True)
        process.kill()
        print((logs / f"{name}.log").read_text(errors="replace")[-800:], flush=True)
    if not ours_done:
        compare_variants(training, work, given.steps, logs, stop - time.time())
    if given.peers:
        words = ["quality_peers.py", "compare", str(run_folder), "--work", str(work), "--pack", str(out)]
        run("compare", words, logs, stop + 15 - time.time())
    keep(work, logs, out, began)


def compare_variants(training: list[str], work: Path, steps: int, logs: Path, seconds: float) -> bool:
    """The variants' figures from the seeds that every one of them has; False while there are none."""
    seeds = dict.fromkeys(VARIANTS, 0)
    for v in VARIANTS:
        while (work / f"{v}-{seeds[v]}-{steps}.json").exists():
            seeds[v] += 1
    ready = [v for v in VARIANTS if seeds[v]]
    if "bf16" not in ready or len(ready) < 2:
        return False
    words = [*training, "--variants", ",".join(ready), "--seeds", str(min(seeds[v] for v in ready))]
    return run("variants", words, logs, seconds)


def keep(work: Path, logs: Path, out: Path, began: float) -> None:
    """Figures made since `began`, every try's own file and the logs, as one file."""
    with tarfile.open(out / "quality.tar.xz", "w:xz", preset=1) as tar:
        for path in (HERE / "results").glob("*.json"):
            if path.stat().st_mtime >= began:
                tar.add(path, f"results/{path.name}")
        for path in work.glob("*.json"):
            tar.add(path, f"tries/{path.name}")
        for path in logs.glob("*.log"):
            tar.add(path, f"logs/{path.name}")


if __name__ == "__main__":
    main()
