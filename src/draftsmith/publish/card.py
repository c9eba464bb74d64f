"""The model card: what the records of a run say about its drafter, and nothing else.

A line whose record is missing says so; no figure is given without its definition. Names come from others and go into
Markdown that a site will render, so they are quoted; paths of this machine are cut to their last part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith import __version__
from draftsmith.report.data import DEFINITIONS
from draftsmith.secrets import redact_text

DATA_LICENCES = {
    "sharegpt": "ShareGPT conversations (prompts alone; published without a licence statement of their authors)",
    "gsm8k_train": "GSM8K (MIT)",
    "gsm8k": "GSM8K (MIT)",
    "mt_bench": "MT-Bench (Apache-2.0)",
    "humaneval": "HumanEval (MIT)",
}
"""Built-in prompt set → its source and licence as its publisher states it."""


def quoted(text: Any) -> str:
    """A foreign name as inline code: no tag, link or line break of its own takes effect."""
    flat = " ".join(str(text).split()).replace("`", "'")
    return f"`{flat}`"


def name_of(model: str) -> str:
    """A target's public name: a hub id as it is, of a path on this machine its last part."""
    return Path(model).name if model.startswith(("/", "~", ".")) or Path(model).is_absolute() else model


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else "not measured"


def front_matter(target: str, licence: str | None) -> str:
    """The card's YAML head, as the hub reads it."""
    head: dict[str, Any] = {"library_name": "vllm", "tags": ["speculative-decoding", "eagle3", "draftsmith"]}
    if target.count("/") == 1:
        head["base_model"] = target
        head["base_model_relation"] = "adapter"
    if licence:
        head["license"] = licence
    import yaml

    return "---\n" + yaml.safe_dump(head, sort_keys=False) + "---\n"


def _target(contract: dict[str, Any]) -> list[str]:
    target, sizes = contract.get("target") or {}, contract.get("sizes") or {}
    return [
        f"* target {quoted(name_of(str(target.get('name', 'not known'))))}"
        + (f", revision {quoted(target['revision'])}" if target.get("revision") else "")
        + f": {quoted(target.get('architecture', '?'))}, {_number(target.get('num_layers'))} layers,"
        + f" hidden size {_number(target.get('hidden_size'))}, {_number(target.get('vocab_size'))} tokens",
        f"* config hash {quoted(str(target.get('config_hash', '?'))[:16])}: it drafts for this config and no other",
        f"* drafter: form {sizes.get('form', '?')}, hidden size {_number(sizes.get('hidden_size'))},"
        f" {_number(contract.get('draft_vocab_size'))} draft tokens",
        f"* reads the streams that enter layers {contract.get('aux_layer_ids')} (counted as vLLM counts)",
        f"* trained with {_number(contract.get('ttt_steps'))} draft steps, up to"
        f" {_number(contract.get('trained_length'))} tokens",
    ]


def _data(records: dict[str, Any]) -> list[str]:
    capture = records.get("capture")
    if not capture:
        return ["No record of the training data lies beside this drafter."]
    config, result = capture["config"]["capture"], capture["result"]
    lines = ["The target's own answers, captured from its server, to these prompts:", ""]
    for source in config["prompts"]:
        name = Path(source.partition(":")[0]).name
        lines.append(f"* {quoted(Path(source).name)}: {DATA_LICENCES.get(name, 'licence not recorded')}")
    lines += [
        "",
        f"{_number(result.get('rows'))} answers, {_number(result.get('answer_tokens'))} answer tokens, temperature"
        f" {config['temperature']}. Kept out of training: {', '.join(map(quoted, config['held_out'])) or 'nothing'}."
        " The answers are the target's; its licence may say what may be trained on them.",
    ]
    return lines


def _figures(bench: dict[str, Any] | None) -> list[str]:
    if not bench:
        return ["Not measured in an engine."]
    engine = bench.get("engine") or {}
    served = " ".join(str(engine.get(k)) for k in ("name", "version") if engine.get(k)) or "an engine"
    rates = bench.get("acceptance_per_position") or []
    rows = [
        ("tokens per target step", bench.get("tokens_per_target_step")),
        ("acceptance length", bench.get("acceptance_length")),
    ]
    rows += [(f"acceptance at position {i}", r) for i, r in enumerate(rates)]
    rows += [("drafts", bench.get("drafts")), ("lossless", bench.get("lossless"))]
    rows += [(f"speed-up at {c} at once", ratio) for c, ratio in (bench.get("speedup") or {}).items()]
    lines = [
        f"Measured in {quoted(served)} on {', '.join(quoted(s) for s in bench.get('sets') or {}) or 'its sets'}:",
        "",
    ]
    lines += ["| figure | value |", "|---|---|", *(f"| {n} | {_number(v)} |" for n, v in rows), ""]
    lines += [f"* *{word}*: {text}" for word, text in DEFINITIONS.items()]
    lines += [f"\n{quoted(text)}" for text in bench.get("notices") or []]
    return lines


def _checked(verdict: dict[str, Any] | None) -> list[str]:
    if not verdict:
        return ["Not checked against an engine's source."]
    engine = verdict.get("engine") or {}
    served = " ".join(str(engine.get(k)) for k in ("name", "version") if engine.get(k)) or "no engine was at hand"
    counts = {s: sum(c["status"] == s for c in verdict.get("checks") or []) for s in ("pass", "warn", "fail", "skip")}
    return [f"`draftsmith check` said **{verdict.get('verdict', '?')}** for {quoted(served)}: "
            + ", ".join(f"{n} {s}" for s, n in counts.items() if n) + "."]  # fmt: skip


def make_card(name: str, parts: dict[str, Any], licence: str | None = None) -> str:
    """The card's Markdown. parts: contract, records (stage → run.json), bench, verdict; each may be missing."""
    contract = parts.get("contract") or {}
    target = name_of(str((contract.get("target") or {}).get("name", "TARGET")))
    steps = (
        ((parts.get("records") or {}).get("bench") or {})
        .get("config", {})
        .get("bench", {})
        .get("num_speculative_tokens", 3)
    )
    speculative = json.dumps({"method": "eagle3", "model": name, "num_speculative_tokens": steps})
    lines = [
        f"# {name}", "", f"An EAGLE-3 draft model for {quoted(target)}, made with draftsmith {__version__}.", "",
        "## How to serve it", "",
        "```sh", f"vllm serve {target} --speculative-config '{speculative}'", "```", "",
        "`draftsmith check` says beforehand whether your engine takes the pair, `draftsmith serve` launches it.", "",
        "## What it is for", "", *_target(contract), "",
        "## Data", "", *_data(parts.get("records") or {}), "",
        "## Figures", "", *_figures(parts.get("bench")), "",
        "## Engines", "", *_checked(parts.get("verdict")), "",
        "## Licence", "", f"{quoted(licence)}." if licence else "Not stated by whoever published it.", "",
    ]  # fmt: skip
    return redact_text(front_matter(target, licence) + "\n".join(lines))
