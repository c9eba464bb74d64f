"""Claim: answers captured together with their states come at 0.92 or more of plain generation's speed.

    python benchmarks/capture_one_pass.py --engine PATH --target FOLDER [--prompts 24 --answer 64 --rounds 3]

Both sides answer the same prompts, the same number of tokens (the end token is ignored), eight at once. Ours also keeps
the states of prompt and answer and stores them (bf16) while it answers. Tokens are answer tokens.
"""

from __future__ import annotations

import argparse
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _figures
from _two_engines import ask_all, both, in_turns, lengths, middle, random_rows

from draftsmith.engine.find import find_engine
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.store import StateWriter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", help="environment of the engine; none = the managed one")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    engine = find_engine(args.engine)
    with both(engine, args.target, 300 + args.answer, args.dtype) as pair:
        facts = pair.contract.target
        prompts = random_rows(lengths(args.prompts, 30, 250), facts.vocab_size)
        answer = {"max_tokens": args.answer, "temperature": 0.7, "ignore_eos": True, "return_token_ids": True}

        def plain() -> int:
            found = ask_all(pair.plain, [{"prompt": p, **answer} for p in prompts], args.at_once)
            return sum(len(c["token_ids"]) for c in found)

        def kept() -> int:
            folder = pair.work / "states"
            shutil.rmtree(folder, ignore_errors=True)
            asked = [pair.wire.ask(len(p)) for p in prompts]
            with StateWriter(folder, pair.contract, make_codec("bf16")) as writer, ThreadPoolExecutor(1) as store:
                bodies = [{"prompt": p, **answer, **fields} for p, (_, fields) in zip(prompts, asked, strict=True)]
                found = ask_all(pair.tapped, bodies, args.at_once)

                def keep(i: int) -> None:
                    ids = prompts[i] + found[i]["token_ids"]
                    states = pair.wire.take(asked[i][0], ids, len(prompts[i]), pair.tapped.require_alive)
                    writer.add(f"r{i}", states)

                list(store.map(keep, range(len(prompts))))
            return sum(len(c["token_ids"]) for c in found)

        sides = {"plain": plain, "with states": kept}
        for side in sides.values():
            side()  # warm
        found = in_turns(args.rounds, sides)
    path = _figures.write(
        "capture_one_pass",
        claim="capture that keeps states while it answers against plain generation, answer tokens per second (median)",
        ours=middle(found["with states"]),
        theirs=middle(found["plain"]),
        unit="tokens/s",
        rows=[{"side": k, "tokens_per_second": v} for k, v in found.items()]
        + [
            {
                "prompts": args.prompts,
                "answer": args.answer,
                "at_once": args.at_once,
                "target": facts.name,
                "dtype": args.dtype,
            }
        ],
        engine_version=engine.version,
    )
    print(json.dumps(json.loads(path.read_text()), indent=1))


if __name__ == "__main__":
    main()
