"""Threats of docs/security.md whose attack fails with its defence and succeeds without it.

python benchmarks/threats.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import _figures
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / p) for p in ("security", "mutants")]


def outcome(attack: object, *args: object) -> str:
    """ "held", "harm", or what else came of it."""
    from threat import HarmError

    try:
        attack(*args)  # type: ignore[operator]
    except HarmError:
        return "harm"
    except Exception as e:
        return type(e).__name__
    return "held"


def main() -> None:
    import test_threats
    from threat import THREATS

    assert test_threats.THREATS is THREATS
    rows = []
    for t in sorted(THREATS, key=lambda t: t.id):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            defended = outcome(t.attack, Path(one))
            with pytest.MonkeyPatch.context() as mp:
                t.off(mp)
                bare = outcome(t.attack, Path(two))
        rows.append({"id": t.id, "threat": t.title, "with its defence": defended, "without": bare})
        print(rows[-1])
    held = sum(r["with its defence"] == "held" and r["without"] == "harm" for r in rows)
    _figures.write(
        "threats",
        claim="attacks that fail on the code as it is and succeed where their defence is taken away",
        ours=held,
        theirs=len(rows),
        unit="threats",
        rows=rows,
    )


if __name__ == "__main__":
    main()
