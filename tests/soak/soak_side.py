"""One process that walks the road again and again: a recipe's path on each line of its input, its own size as the answer."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from pathlib import Path

import psutil


def main() -> None:
    from draftsmith.pipeline import run_all
    from draftsmith.recipe import load_recipe
    from draftsmith.ui import QuietUi

    me, out = psutil.Process(), sys.stdout
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            run_all(load_recipe(Path(line.strip())), QuietUi(), until="export")
        gc.collect()
        told = {"rss": me.memory_info().rss, "fds": me.num_fds(), "threads": me.num_threads()}
        print(json.dumps(told), file=out, flush=True)


if __name__ == "__main__":
    main()
