"""The road in a loop with random kills: rounds in which nothing was lost, left behind or grown.

python benchmarks/soak.py --minutes 30
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import _figures

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "soak")]


def main() -> None:
    from soak_road import growth, soak
    from test_soak import SEEDS

    from conftest import write_tiny_llama

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as tmp:
        target = write_tiny_llama(Path(tmp) / "target")
        rounds = soak(Path(tmp) / "soak", target, minutes, SEEDS)
    sound = sum(not r.lost and not r.left for r in rounds)
    grown = growth(rounds)
    kills = sum(r.kills for r in rounds)
    _figures.write(
        "soak",
        claim=f"the road in a loop for {minutes:g} minutes, {kills} SIGKILLs that met it at work: rounds that lost no row "
        f"and left no process or file behind; {'; '.join(grown) or 'no growth of memory, files or threads'}",
        ours=sound,
        theirs=len(rounds),
        unit="rounds",
        rows=[{**r.as_dict(), "left": len(r.left), "lost": len(r.lost)} for r in rounds],
    )


if __name__ == "__main__":
    main()
