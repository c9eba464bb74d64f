"""Claim: the interface that the plugin gives costs at most 5 % of decode tokens per second against a class's own.

    python benchmarks/shim.py --engine /opt/vllm --target models/llama --drafter runs/demo-eagle3 [--rounds 6] [--transformers]

Three servers of one engine with the same target and drafter: the class's own EAGLE-3 interface, the plugin's shim forced
on the same class, and (--transformers) the engine's Transformers backend, whose base class has the interface. All stay up
and are asked in turns, so that whatever else the machine does falls on all sides alike. The answers must be the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _figures
from _two_engines import ask_all, in_turns, middle, random_rows

from draftsmith.engine.find import find_engine
from draftsmith.engine.plugin_src.draftsmith_vllm.shim import VARIABLE
from draftsmith.engine.server import Server
from draftsmith.target.config import target_facts

ROWS, PROMPT, ANSWER, AT_ONCE = 4, 16, 48, 4
MOST = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--transformers", action="store_true")
    args = parser.parse_args()
    engine = find_engine(args.engine)
    vocab = target_facts(args.target).vocab_size
    spec = {"method": "eagle3", "model": str(args.drafter.resolve()), "num_speculative_tokens": 3}
    kinds: dict[str, dict[str, Any]] = {"own": {}, "shim": {"env": {VARIABLE: "force"}}}
    if args.transformers:
        kinds["transformers"] = {"args": ["--model-impl", "transformers"]}
    bodies = [
        {"prompt": p, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for p in random_rows([PROMPT] * ROWS, vocab)
    ]
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            name: stack.enter_context(
                Server(engine, args.target, speculative=spec, log=work / f"{name}.log", max_model_len=256, **more)
            )
            for name, more in kinds.items()
        }
        for name in servers:
            given = "EAGLE-3 interface" in (work / f"{name}.log").read_text()
            assert given is (name == "shim"), f"{name}: the shim was {'' if given else 'not '}on"
        answers = {name: [a["token_ids"] for a in ask_all(s, bodies, 1)] for name, s in servers.items()}
        equal = {n: sum(a == b for a, b in zip(answers["own"], answers[n], strict=True)) for n in answers}

        def side(server: Server) -> Any:
            return lambda: sum(len(a["token_ids"]) for a in ask_all(server, bodies, AT_ONCE))

        found = in_turns(args.rounds, {name: side(s) for name, s in servers.items()})
    medians = {name: middle(v) for name, v in found.items()}
    rows = [
        {"side": n, "tokens_per_second": v, "median": medians[n], "answers_equal": f"{equal[n]} of {ROWS}"}
        for n, v in found.items()
    ]
    _figures.write(
        "shim",
        claim="decode tokens/s with the plugin's interface forced on a class against the class's own (goal: at least 0.95)",
        ours=medians["shim"],
        theirs=medians["own"],
        unit="tokens/s",
        rows=rows,
        engine_version=engine.version,
    )
    print(medians, equal)
    sys.exit(0 if medians["shim"] >= (1 - MOST) * medians["own"] else 1)


if __name__ == "__main__":
    main()
