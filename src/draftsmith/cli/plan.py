"""draftsmith plan: tokens, bytes, hours and memory before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from draftsmith.cli.common import console, print_json


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    recipe: Path | None = typer.Argument(None, help="YAML recipe; its figures hold where no option is given"),
    stage: str | None = typer.Option(None, help="capture, extract or train alone"),
    target: str | None = typer.Option(None, help="target's folder, config.json or hub id (the config alone is read)"),
    hidden_size: int | None = typer.Option(None, help="the target's hidden size"),
    layers: int | None = typer.Option(None, help="the target's layers"),
    vocab_size: int | None = typer.Option(None, help="the target's vocabulary"),
    rows: int | None = typer.Option(None, help="captured rows (prompts x samples)"),
    tokens_per_row: float | None = typer.Option(None, help="tokens of a row, prompt and answer"),
    supervised: float | None = typer.Option(None, help="share of a row's tokens that are answer; all if not known"),
    aux_layers: int | None = typer.Option(None, help="number of aux layers"),
    codec: str | None = typer.Option(None, help="bf16, fp8 or fp8-topk"),
    topk: int | None = typer.Option(None, help="logits kept by fp8-topk"),
    draft_vocab: int | None = typer.Option(None, help="size of the draft vocab"),
    capture_rate: float | None = typer.Option(None, help="answer tokens per second of the servers together"),
    extract_rate: float | None = typer.Option(None, help="tokens per second of the second pass"),
    train_rate: float | None = typer.Option(None, help="tokens per second of training"),
    epochs: float | None = typer.Option(None, help="passes over the states"),
    ttt_steps: int | None = typer.Option(None, help="draft steps unrolled in training (K)"),
    batch_tokens: int | None = typer.Option(None, help="packed tokens per device and step"),
    optimizer: str | None = typer.Option(None, help="adamw, adamw-lean or muon"),
    dtype: str | None = typer.Option(None, help="bfloat16 or float32"),
    recompute: bool | None = typer.Option(None, help="compute draft steps again in the backward pass"),
    context_parallel: int | None = typer.Option(None, help="GPUs that share one packed sequence"),
    intermediate_size: int | None = typer.Option(None, help="the drafter's MLP width"),
    num_attention_heads: int | None = typer.Option(None, help="the drafter's heads"),
    num_key_value_heads: int | None = typer.Option(None, help="the drafter's key/value heads"),
    head_dim: int | None = typer.Option(None, help="the drafter's head size"),
    drafter_hidden_size: int | None = typer.Option(None, help="the drafter's hidden size; none = the target's"),
    devices: int | None = typer.Option(None, help="GPUs; none = those that are here"),
    tflops: float | None = typer.Option(None, help="peak TFLOP/s of all devices, for assumed rates"),
    overrides: list[str] = typer.Option([], "--set", help="section.key=value laid over the recipe; may be repeated"),
    as_json: bool = typer.Option(False, "--json", help="print the plan as JSON"),
) -> None:
    """Forecast bytes, hours and memory of a run; nothing is run.

    Measured rates of the recipe's run replace assumed ones. Without a recipe the options are enough:
    draftsmith plan --hidden-size 7168 --rows 10000 --tokens-per-row 1444 --extract-rate 3165
    """
    given = {k: v for k, v in locals().items() if v is not None}
    from draftsmith.plan import Figures, make_plan, with_recipe, with_target

    options = {k: v for k, v in given.items() if k in Figures.__dataclass_fields__}
    _validate(options)
    figures = Figures(**options, sources=dict.fromkeys(options, "given"))
    if recipe is not None:
        from draftsmith.cli.stages import parse_overrides
        from draftsmith.recipe import load_recipe

        loaded = load_recipe(recipe, parse_overrides(overrides))
        figures = with_recipe(figures, loaded)
        target = target or loaded.target.model
    if target is not None:
        from draftsmith.target.config import load_config

        figures = with_target(figures, load_config(target))
    made = make_plan(figures, stage)
    if as_json:
        print_json(made)
    else:
        show(made)


def _validate(options: dict[str, Any]) -> None:
    from draftsmith.errors import UserError, nearest
    from draftsmith.extract.sizes import CODECS

    known = {"codec": CODECS, "optimizer": ("adamw", "adamw-lean", "muon"), "dtype": ("bfloat16", "float32")}
    for name, value in options.items():
        flag = name.replace("_", "-")
        if name in known and value not in known[name]:
            close = nearest(str(value), known[name])
            hint = f"did you mean {close[0]!r}?" if close else ""
            raise UserError(f"--{flag} is {value!r}", hint, f"known: {', '.join(known[name])}")
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise UserError(f"--{flag} is {value}", "a count or rate is above zero", f"give --{flag} as it is")


def _bytes(n: float) -> str:
    unit = next((u for u in ("TB", "GB", "MB") if n >= {"TB": 1e12, "GB": 1e9, "MB": 1e6}[u]), "kB")
    return f"{n / {'TB': 1e12, 'GB': 1e9, 'MB': 1e6, 'kB': 1e3}[unit]:,.1f} {unit}"


def _until(seconds: float | None, after: float | None) -> str:
    """The whole time; where only the part after the answers is known, that."""
    if seconds is None and after is not None:
        return f"{_time(after)} after the answers" if after else "with the answers"
    return _time(seconds)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "not known"
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def show(made: dict[str, Any]) -> None:
    """Two tables and the sources."""
    from rich.table import Table

    if "tokens" in made:
        console.print(
            f"{made['rows']:,} rows, {made['tokens']:,} tokens, {made['bytes_per_token']:,} B of states a token "
            f"({made['codec']}): {_bytes(made['bytes'])}",
            highlight=False,
        )
    table = Table("stage", "tokens", "tokens/s", "time", "needs", "rate is")
    for name, s in made["stages"].items():
        needs = _bytes(s["bytes"]) + " of disk" if "bytes" in s else ""
        if (memory := s.get("memory")) and "total" in memory:
            needs = f"{_bytes(memory['total'])} of memory" + (" (does not fit)" if memory["fits"] is False else "")
        rate = f"{s['tokens_per_second']:,.0f}" if s["tokens_per_second"] else "?"
        tokens = f"{s['tokens']:,}" if "tokens" in s else "?"
        table.add_row(name, tokens, rate, _time(s["seconds"]), needs, s.get("rate_source") or "")
    console.print(table)
    if made.get("choices"):
        choices = Table("way", "codec", "disk", "until the states are there")
        for c in made["choices"]:
            size = _bytes(c["bytes"]) if c["bytes"] else "none"
            choices.add_row(c["way"], c["codec"], size, _until(c["seconds"], c["seconds_after_capture"]))
        console.print(choices)
    for name, source in made["sources"].items():
        if source.startswith("assumed"):
            console.print(f"{name.replace('_', ' ')}: {source}", highlight=False)
    for text in made["unknown"]:
        console.print(f"not known: {text}", highlight=False)
