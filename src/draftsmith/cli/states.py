"""draftsmith states: look at a store of hidden states, verify it, change its form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftsmith.cli.common import console, print_json
from draftsmith.errors import Exit

if TYPE_CHECKING:
    from draftsmith.extract.store import StateStore


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Look at stored hidden states, verify them, change their form.")
    group.command("show")(show)
    group.command("verify")(verify)
    group.command("convert")(convert)
    group.command("copy")(copy)
    group.command("import")(import_)
    group.command("export")(export)
    app.add_typer(group, name="states")


def _open(folder: str) -> StateStore:
    """The store in a folder, in a run's folder, or at a URL."""
    from draftsmith.extract.store import StateStore

    if "://" not in folder and (Path(folder) / "extract" / "store.json").is_file():
        return StateStore.open(Path(folder) / "extract")
    return StateStore.open(folder)


def _summary(folder: str) -> dict[str, Any]:
    store = _open(folder)
    rows = max(len(store), 1)
    return {
        "folder": str(folder),
        "codec": store.codec.name,
        "target": store.contract.target.name,
        "aux_layer_ids": store.contract.aux_layer_ids,
        "rows": len(store),
        "tokens": store.tokens,
        "bytes": store.bytes,
        "bytes_per_token": round(store.bytes / max(store.tokens, 1)),
        "tokens_per_row": round(store.tokens / rows, 1),
        "shards": len(store.shards),
        "skipped": store.skipped,
    }


def show(
    folder: str = typer.Argument(help="folder of the store, a run's folder, or a URL (s3://…)"),
    row: str | None = typer.Option(None, help="show one row: its shapes and the size of each stream"),
    as_json: bool = typer.Option(False, "--json", help="print JSON"),
) -> None:
    """What a store holds: rows, tokens, bytes, codec, layers."""
    from draftsmith.errors import UserError

    if row is None:
        found = _summary(folder)
    else:
        store = _open(folder)
        try:
            s = store.read(row)
        except KeyError:
            raise UserError(
                f"no row {row!r} in {folder}",
                "",
                f"it holds {len(store)} rows, e.g. " + ", ".join(e.row_id for e in store.index[:3]),
            ) from None
        rms = s.aux.float().square().mean(dim=(0, 2)).sqrt().tolist()
        found = {
            "row_id": row,
            "tokens": s.tokens,
            "boundary": s.boundary,
            "final_start": s.final_start,
            "aux_shape": list(s.aux.shape),
            "aux_rms": {str(k): round(v, 4) for k, v in zip(store.contract.aux_layer_ids or [], rms, strict=True)},
            "teacher": "top-k logits" if s.topk is not None else "final state",
        }
    if as_json:
        print_json(found)
        return
    for key, value in found.items():
        console.print(
            f"{key.replace('_', ' ')}: {value:,}" if isinstance(value, int) else f"{key}: {value}", markup=False
        )


def verify(
    folder: str = typer.Argument(help="folder of the store, a run's folder, or a URL (s3://…)"),
    as_json: bool = typer.Option(False, "--json", help="print JSON"),
) -> None:
    """Read every shard, compare its checksum, decode every row. Exit code 0: all is well, 1: something is not."""
    store = _open(folder)
    problems = store.verify()
    if as_json:
        print_json({"ok": not problems, "rows": len(store), "tokens": store.tokens, "problems": problems})
    else:
        for text in problems:
            console.print(text, style="red", markup=False, highlight=False)
        verdict = f"{len(problems)} problem(s)" if problems else "in order"
        console.print(f"{len(store):,} rows, {store.tokens:,} tokens, {len(store.shards)} shard(s): {verdict}")
    if problems:
        raise typer.Exit(int(Exit.NO))


def convert(
    source: Path = typer.Argument(help="folder of the store"),
    target: Path = typer.Argument(help="folder to write"),
    codec: str = typer.Option("fp8", help="bf16, fp8, or fp8-topk (needs --vocab and --model)"),
    vocab: Path | None = typer.Option(None, help="folder with the draft vocab (vocab.safetensors)"),
    model: Path | None = typer.Option(None, help="the target's folder, for its norm and lm_head"),
    topk: int = typer.Option(128, help="logits kept by fp8-topk"),
) -> None:
    """Write a store anew with another codec. Resumable."""
    from draftsmith.extract.convert import convert_store
    from draftsmith.ui import ConsoleUi

    done = convert_store(source, target, codec, ConsoleUi(), vocab=vocab, model=model, topk=topk)
    console.print(f"{done['rows']:,} rows, {done['bytes'] / 1e9:.2f} GB (was {done['bytes_before'] / 1e9:.2f})")


def copy(
    source: str = typer.Argument(help="folder or URL (s3://…, gs://…, sftp://…) of the store"),
    target: str = typer.Argument(help="folder or URL to copy it to"),
) -> None:
    """Copy a store to or from any storage that fsspec knows. Resumable; `states verify` reads a URL as well."""
    from draftsmith.extract.elsewhere import copy_store

    done = copy_store(source, target)
    console.print(f"{done['shards']} shard(s), {done['bytes'] / 1e9:.2f} GB; {done['copied']} copied now", markup=False)


def _layers(text: str | None) -> list[int] | None:
    from draftsmith.errors import UserError

    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--aux-layers {text!r}", "", "write ids with commas, e.g. 2,15,27") from None


def import_(
    source: Path = typer.Argument(help="data folder of speculators (it holds hidden_states/)"),
    target: Path = typer.Argument(help="folder to write the store to"),
    model: Path = typer.Option(..., help="the target's folder"),
    aux_layers: str | None = typer.Option(
        None, help="ids of the aux layers, with commas; none = those of the folder's contract.json, else 2,n//2,n-3"
    ),
) -> None:
    """Read hidden states that speculators made, bit for bit. Resumable."""
    from draftsmith.contract import FILE, Contract, require_agreement
    from draftsmith.extract.speculators import read_speculators
    from draftsmith.target.config import check_aux_layers, default_aux_layers, target_facts

    facts = target_facts(model)
    given = _layers(aux_layers)
    own = Contract.load(source) if (source / FILE).is_file() else None  # of a folder that `states export` wrote
    if given is None and own is not None:
        given = own.aux_layer_ids
    ids = default_aux_layers(facts.num_layers) if given is None else check_aux_layers(given, facts.num_layers)
    contract = Contract(target=facts, aux_layer_ids=ids)
    if own is not None:
        require_agreement(own, contract, str(source), "this call")
    done = read_speculators(source, target, own or contract)
    console.print(f"{done['rows']:,} rows, {done['tokens']:,} tokens")
    for reason, count in done["left_out"].items():
        console.print(f"{count:,} left out: {reason}")


def export(
    source: Path = typer.Argument(help="folder of the store"),
    target: Path = typer.Argument(help="folder to write"),
) -> None:
    """Write a store as a data folder of speculators."""
    from draftsmith.extract.speculators import write_speculators
    from draftsmith.extract.store import StateStore

    done = write_speculators(StateStore.open(source), target)
    console.print(f"{done['rows']:,} rows, {done['tokens']:,} tokens")
