"""A whole measurement: the ways one after another, losslessness, samples, bench.json."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.bench import sampling
from draftsmith.bench.buckets import by_language
from draftsmith.bench.load import Pass
from draftsmith.bench.lossless import Difference, differences, judge, verdict
from draftsmith.bench.result import assemble
from draftsmith.bench.samples import make_samples
from draftsmith.bench.sampling import SamplingTest
from draftsmith.bench.ways import SAMPLED, Measured, Opened, Opener, Plan, load_way, measure_way
from draftsmith.capture.prompts import Prompt, load_prompts
from draftsmith.engine.client import EngineClient
from draftsmith.engine.find import Engine
from draftsmith.engine.flags import known_flags, wish
from draftsmith.engine.sglang_server import server_class
from draftsmith.errors import UserError
from draftsmith.record import read_json, write_json
from draftsmith.ui import Ui

NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
"""vLLM's own drafting from the prompt; the minimum of 2 gives it more chances than its default."""

JUDGED_BATCHED = 8
"""Of the answers that differ when batched, so many are shown with their logits."""


def load_sets(specs: list[str], cap: int | None = None) -> dict[str, list[Prompt]]:
    """Set name → prompts of specs like "mt_bench:40"; UserError for a set given twice under one name."""
    found: dict[str, list[Prompt]] = {}
    for spec in specs:
        prompts = load_prompts(spec)[:cap]
        name = prompts[0].source
        if name in found:
            raise UserError(f"prompt set {name!r} is given twice", "", "give each set once")
        # A multi-turn prompt is measured at its first turn to answer: the later ones contain reference answers.
        found[name] = [Prompt(p.prompt_id, p.source, p.messages[: p.points[0]], p.tools) for p in prompts]
    return found


def speculative_of(way: str, drafter: Path | None, tokens: int) -> dict[str, Any] | None:
    """vLLM's speculative config of a way."""
    if way == "none":
        return None
    if way == "ngram":
        return NGRAM | {"num_speculative_tokens": tokens}
    if drafter is None:
        raise UserError("the way 'drafter' needs a drafter", "", "give the exported folder")
    return {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": tokens}


@dataclass(frozen=True)
class VllmOpener:
    """Starts vLLM for a way. server: further arguments of Server."""

    engine: Engine
    target: Path | str
    drafter: Path | None
    num_speculative_tokens: int
    folder: Path
    ui: Ui
    server: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, way: str) -> Iterator[Opened]:
        spec = speculative_of(way, self.drafter, self.num_speculative_tokens)
        known = known_flags(self.engine.package)
        args = list(self.server.get("args", []))
        if spec:
            args += wish(known, ["--per-request-spec-decode-metrics", "detailed"])
        else:
            args += wish(known, ["--logprobs-mode", "raw_logits"])
        self.ui.note(f"{way}: starting {self.engine.label}")
        given = self.server | {"args": args, "log": self.folder / f"engine-{way}.log", "ui": self.ui}
        with server_class(self.engine.name)(self.engine, self.target, speculative=spec, **given) as server:
            info = {
                "speculative": spec,
                "ready_seconds": server.ready_seconds,
                "kv_tokens": server.kv_tokens,
                "raw_logits": "raw_logits" in args,
                "args": args,
            }
            yield Opened(lambda: EngineClient(server.url, server.name, retries=2), info, server.require_alive)


def run_bench(
    plan: Plan,
    ways: list[str],
    opener: Opener,
    folder: Path,
    engine: dict[str, Any],
    ui: Ui,
    decode: Callable[[list[int]], str] | None = None,
    lead: str = "drafter",
) -> dict[str, Any]:
    """Measure `ways`, write folder/bench.json and samples.json, return the former. Restartable."""
    measured: dict[str, Measured] = {}
    for way in ways:
        if way != "none":
            measured[way] = measure_way(opener, way, plan, folder, ui)
    lossless: dict[str, Any] | None = None
    if "none" in ways:
        measured["none"], lossless = _plain_and_lossless(plan, measured, opener, folder, ui)
    bench = assemble(plan, {w: measured[w] for w in ways}, lossless, engine, lead)
    bench["sampling"] = (lossless or {}).pop("sampling", None)
    if bench["sampling"] and bench["sampling"]["verdict"] == "different":
        t, p = plan.sampling_test.temperature if plan.sampling_test else 0.0, bench["sampling"]["p"]
        bench["notices"].append(f"sampling at temperature {t:g} is not what it is without the drafter (p = {p:.2g})")
    texts = {p.prompt_id: p.first_user for some in plan.prompts.values() for p in some}
    leading = measured.get(lead) or next(iter(measured.values()))
    main = [r for name, c, *_ in plan.passes() if c == plan.main for r in leading.passes[name].requests]
    bench["by_context_length"] = bench["ways"][leading.way].get("by_context_length", {})
    bench["by_language"] = by_language(main, texts)
    if decode is not None:
        write_json(folder / "samples.json", make_samples(main, texts, decode))
    write_json(folder / "bench.json", bench)
    return bench


def _plain_and_lossless(
    plan: Plan, others: dict[str, Measured], opener: Opener, folder: Path, ui: Ui
) -> tuple[Measured, dict[str, Any] | None]:
    """Measure the plain way and, its server still up, judge the differences of the others to it.

    Greedy answers are compared at temperature 0 and one at a time only; the sampling test wherever it was asked for."""
    single = next((n for n, c, *_ in plan.passes() if c == 1), None)
    ours = others.get("drafter") or next(iter(others.values()), None)
    greedy = plan.temperature == 0 and single is not None
    if ours is None or not (greedy or plan.sampling_test):
        return measure_way(opener, "none", plan, folder, ui), None
    if (folder / "lossless.json").is_file() and (plain := load_way(folder, "none", plan)):
        ui.note("none: already measured")
        return plain, read_json(folder / "lossless.json")

    async def compare(client: EngineClient) -> None:
        plain = load_way(folder, "none", plan)
        assert plain is not None
        found = verdict(0, [], False)
        if greedy and single is not None:
            found = await _compare(client, plain, others, ours, single, plan, ui)
        if plan.sampling_test is not None:
            found["sampling"] = await _sampled(client, folder, ours.way, plan.sampling_test)
        write_json(folder / "lossless.json", found)

    plain = measure_way(opener, "none", plan, folder, ui, compare)
    return plain, read_json(folder / "lossless.json")


async def _sampled(client: EngineClient, folder: Path, way: str, test: SamplingTest) -> dict[str, Any]:
    sides = [Pass.load(folder / "ways" / w / SAMPLED) for w in (way, "none")]
    scores = (await sampling.score(client, sides[0]), await sampling.score(client, sides[1]))
    return sampling.judge(sides[0], sides[1], scores, test) | {"way": way}


async def _compare(
    client: EngineClient,
    plain: Measured,
    others: dict[str, Measured],
    ours: Measured,
    single: str,
    plan: Plan,
    ui: Ui,
) -> dict[str, Any]:
    logits = bool(plain.info.get("raw_logits"))
    compared, found = differences(plain.passes[single], ours.passes[single])
    with_ids = all(r.token_ids for r in plain.passes[single].requests)
    result = verdict(compared, await judge(client, found, logits, ui), with_ids) | {"way": ours.way}
    ui.note(f"lossless ({ours.way}): {result['equal']} of {compared} equal, {result['ties']} ties")
    result["other_ways"] = {}
    for way, m in others.items():
        if way != ours.way:
            n, rest = differences(plain.passes[single], m.passes[single])
            rows = await judge(client, rest, logits, ui)
            result["other_ways"][way] = verdict(n, rows, with_ids)
    result["batched"] = await _batched(client, plain, ours, plan, logits, ui)
    return result


async def _batched(
    client: EngineClient, plain: Measured, ours: Measured, plan: Plan, logits: bool, ui: Ui
) -> dict[str, Any] | None:
    """The same at `plan.main`, where plain runs differ among themselves: counts, and some first differences shown."""
    if plan.main == 1:
        return None
    total, all_found = 0, list[Difference]()
    for name, c, *_ in plan.passes():
        if c == plan.main:
            n, found = differences(plain.passes[name], ours.passes[name])
            total, all_found = total + n, all_found + found
    rows = await judge(client, all_found[:JUDGED_BATCHED], logits, ui)
    return {"concurrency": plan.main, "compared": total, "equal": total - len(all_found), "shown": rows}
