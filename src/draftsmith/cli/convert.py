"""`draftsmith convert IN OUT --to DIALECT`: a drafter from any dialect into another, every patch said."""

from __future__ import annotations

from pathlib import Path

import typer

from draftsmith.cli.common import console, print_json
from draftsmith.errors import UserError, nearest

DIALECTS = ("vllm", "speculators", "sglang", "eagle")


def register(app: typer.Typer) -> None:
    @app.command(
        "convert",
        help="Convert a drafter between the files of engines and trainers.\n\n"
        "They are vllm, speculators, sglang (SpecForge) and eagle (SafeAILab); the form of the source is found out.",
    )
    def convert(
        source: Path = typer.Argument(help="folder of the drafter"),
        out: Path = typer.Argument(help="folder to write; must not exist or be empty"),
        to: str = typer.Option(..., help=f"one of {', '.join(DIALECTS)}"),
        target: Path = typer.Option(None, help="the target's folder: settles aux ids and the embedding table"),
        aux_layers: str = typer.Option(None, help="aux layer ids, e.g. 2,16,29 (id k = stream entering layer k)"),
        aux_meaning: str = typer.Option(None, help="what the file's ids count: entering or output"),
        allow_pickle: bool = typer.Option(False, help="read .bin weights (torch's weights-only reader)"),
        dtype: str = typer.Option(None, help="bfloat16, float32 or float16; none = as it is"),
        as_json: bool = typer.Option(False, "--json", help="print the result as JSON"),
    ) -> None:
        from draftsmith.dialects.convert import convert_folder

        if to not in DIALECTS:
            close = nearest(to, tuple(DIALECTS))
            raise UserError(
                f"--to {to!r} is no dialect",
                "",
                f"did you mean {close[0]!r}?" if close else f"one of {', '.join(DIALECTS)}",
            )
        if aux_meaning not in (None, "entering", "output"):
            raise UserError(f"--aux-meaning {aux_meaning!r}", "", "entering (vLLM's) or output (SGLang's)")
        try:
            ids = [int(i) for i in aux_layers.split(",")] if aux_layers else None
        except ValueError:
            raise UserError(f"--aux-layers {aux_layers!r}", "", "whole numbers with commas, e.g. 2,16,29") from None
        result = convert_folder(
            source,
            out,
            to,
            target=target,
            aux_layers=ids,
            aux_meaning=aux_meaning,
            allow_pickle=allow_pickle,
            dtype=dtype,
        )
        if as_json:
            print_json(result)
            return
        for note in result["notes"]:
            console.print(f"- {note}", markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"wrote {result['tensors']} tensors to {out} ({to}), read back bit for bit", markup=False, soft_wrap=True
        )
