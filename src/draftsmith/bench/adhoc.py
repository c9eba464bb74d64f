"""A measurement without a recipe: a pair of folders, or servers that already run; and the sweep of `--tune`."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.bench.endpoint import ENDPOINT, EndpointOpener, describe_endpoint
from draftsmith.bench.run import VllmOpener, load_sets, run_bench
from draftsmith.bench.sampling import SamplingTest
from draftsmith.bench.tune import sweep
from draftsmith.bench.ways import Opener, Plan
from draftsmith.errors import UserError
from draftsmith.recipe import TargetSection
from draftsmith.record import content_hash, folder_hash, read_json, write_json
from draftsmith.secrets import secret
from draftsmith.ui import Ui

WAYS = ("drafter", "none", "ngram")


@dataclass(frozen=True)
class Asked:
    """What the command line asked for; see `draftsmith bench --help`."""

    prompts: list[str]
    ways: list[str]
    concurrency: list[int]
    target: str | None = None
    drafter: Path | None = None
    engine: str | None = None
    endpoint: str | None = None
    baseline: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    max_tokens: int = 128
    single_prompts: int = 20
    single_max_tokens: int = 64
    temperature: float = 0.0
    sampling_test: float | None = None
    repeats: int = 1
    num_speculative_tokens: int = 3
    tune: list[int] | None = None
    max_model_len: int = 2048

    def plan(self) -> Plan:
        return Plan(
            load_sets(self.prompts),
            self.concurrency,
            self.max_tokens,
            self.single_prompts,
            self.single_max_tokens,
            self.temperature,
            self.repeats,
            SamplingTest(self.sampling_test) if self.sampling_test else None,
        )


def measure(asked: Asked, out: Path, ui: Ui, force: bool = False) -> dict[str, Any]:
    """bench.json of what was asked for, in `out`. The same question goes on where it was killed; another one, or
    other files, starts from nothing. A running server is always measured anew."""
    _require_sense(asked)
    question = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(asked).items()}
    if asked.drafter is not None:
        question["drafter_hash"] = folder_hash(asked.drafter)
    key = content_hash(question)
    inputs = out / "inputs.json"
    same = inputs.is_file() and read_json(inputs).get("key") == key
    if out.exists() and (force or asked.endpoint or not same):
        if any(out.iterdir()) and not inputs.is_file():
            raise UserError(f"{out} holds something else than a bench", "", "give another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(inputs, {"key": key, **question})
    plan = asked.plan()
    if asked.endpoint:
        return _endpoint(asked, plan, out, ui)
    return _launch(asked, plan, out, ui)


def _require_sense(asked: Asked) -> None:
    unknown = [w for w in asked.ways if w not in WAYS]
    if unknown:
        raise UserError(f"there is no way {unknown[0]!r}", "", f"ways: {', '.join(WAYS)}")
    if asked.endpoint and (asked.target or asked.drafter or asked.tune):
        raise UserError(
            "--endpoint measures a server as it runs; --target, --drafter and --tune launch one",
            "",
            "give either the address or the files",
        )
    if not asked.endpoint and not asked.target:
        raise UserError("nothing to measure", "", "give a recipe, or --target and --drafter, or --endpoint URL")
    if asked.baseline and not asked.endpoint:
        raise UserError("--baseline stands beside --endpoint", "", "give --endpoint as well")
    needs = "drafter" in asked.ways and not asked.endpoint
    if needs and (asked.drafter is None or not asked.drafter.is_dir()):
        raise UserError(
            f"no drafter at {asked.drafter}" if asked.drafter else "no drafter given",
            "the way 'drafter' measures one",
            "give --drafter FOLDER, or --ways none,ngram",
        )


def _endpoint(asked: Asked, plan: Plan, out: Path, ui: Ui) -> dict[str, Any]:
    assert asked.endpoint is not None
    key = secret(asked.api_key_env) if asked.api_key_env else None
    about = describe_endpoint(asked.endpoint, asked.model, key)
    if not about["speculative"]:
        ui.warn(f"{asked.endpoint} drafts nothing: its metrics page has no speculation counters")
    urls = {ENDPOINT: asked.endpoint}
    if asked.baseline:
        describe_endpoint(asked.baseline, asked.model, key)
        urls["none"] = asked.baseline
    return run_bench(plan, list(urls), EndpointOpener(urls, asked.model, key), out, about, ui, lead=ENDPOINT)


def _launch(asked: Asked, plan: Plan, out: Path, ui: Ui) -> dict[str, Any]:
    from draftsmith.bench.stage import REFERENCE, decoder
    from draftsmith.engine.facts import describe
    from draftsmith.engine.find import find_engine
    from draftsmith.target.resolve import resolve_target

    target = resolve_target(TargetSection(model=str(asked.target)))
    decode = decoder(target)
    opener: Opener
    if asked.engine == REFERENCE:
        from draftsmith.bench.reference import ReferenceOpener, describe_reference

        opener = ReferenceOpener(target, asked.drafter, asked.num_speculative_tokens, ui)
        return run_bench(plan, asked.ways, opener, out, describe_reference(), ui, decode)
    engine = find_engine(asked.engine)
    about = describe(engine)
    about = {"name": about.pop("engine"), **about}
    server = {"max_model_len": asked.max_model_len}
    vllm = VllmOpener(engine, target, asked.drafter, asked.num_speculative_tokens, out, ui, server)
    bench = run_bench(plan, asked.ways, vllm, out, about, ui, decode)
    if asked.tune:
        bench["tune"] = sweep(
            lambda k: replace(vllm, num_speculative_tokens=k), asked.tune, plan, bench, out / "tune", ui
        )
        write_json(out / "bench.json", bench)
    return bench
