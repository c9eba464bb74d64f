"""Claim: extraction in a second pass runs at 0.90 or more of the engine's plain prefill, on the same rows.

    python benchmarks/extract_two_pass.py --engine PATH --target FOLDER [--rows 24 --rounds 3]

Plain: the rows as prompts to a server without the plugin, one token asked for. Ours: the same rows through VllmBackend
to a store on disk (bf16), states checked against token ids. Tokens are those of the rows. `argmax` says whether the
target's most likely token at the answer positions is computed too (the trainer wants it; its lm_head products are no
part of a plain prefill, and weigh much in a model as small as SmolLM2).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import _figures
import numpy as np
from _two_engines import ask_all, both, in_turns, lengths, middle, random_rows

from draftsmith.engine.find import find_engine
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.packing import packed
from draftsmith.extract.rows import Item, batches
from draftsmith.extract.store import StateWriter
from draftsmith.extract.vllm_backend import REQUESTS, VllmBackend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", help="environment of the engine; none = the managed one")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shortest", type=int, default=100)
    parser.add_argument("--longest", type=int, default=500)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    engine = find_engine(args.engine)
    with both(engine, args.target, args.longest + 1, args.dtype) as pair:
        facts = pair.contract.target
        rows = random_rows(lengths(args.rows, args.shortest, args.longest), facts.vocab_size)
        items = [Item(f"r{i}", np.asarray(r, dtype=np.int32), len(r) // 2) for i, r in enumerate(rows)]
        tokens = sum(len(r) for r in rows)
        backend = VllmBackend(pair.tapped, pair.wire, args.target, facts.hidden_size, None, 0)

        def plain() -> int:
            ask_all(pair.plain, [{"prompt": r, "max_tokens": 1, "temperature": 0} for r in rows], REQUESTS)
            return tokens

        def through(argmax: bool) -> int:
            pair.wire.argmax = argmax
            folder = pair.work / "states"
            shutil.rmtree(folder, ignore_errors=True)
            with StateWriter(folder, pair.contract, make_codec("bf16")) as writer:
                for _, found in packed(backend.stream(batches(items, 2048)), writer):
                    for _, row in found:
                        assert row is not None
                        writer.put(row)
            return tokens

        sides = {"plain": plain, "states": lambda: through(False), "states and argmax": lambda: through(True)}
        for side in sides.values():
            side()  # warm
        found = in_turns(args.rounds, sides)
        backend.close()
    path = _figures.write(
        "extract_two_pass",
        claim="two-pass extraction against plain prefill on the same rows, tokens per second (median of rounds)",
        ours=middle(found["states"]),
        theirs=middle(found["plain"]),
        unit="tokens/s",
        rows=[{"side": k, "tokens_per_second": v} for k, v in found.items()]
        + [
            {
                "rows": args.rows,
                "tokens": tokens,
                "target": facts.name,
                "dtype": args.dtype,
                "platform": engine.platform,
            }
        ],
        engine_version=engine.version,
    )
    print(json.dumps(json.loads(path.read_text()), indent=1))


if __name__ == "__main__":
    main()
