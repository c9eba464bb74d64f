"""Put a drafter and its card into a folder, or into a repository of a model hub."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from draftsmith.errors import Exit, UserError
from draftsmith.publish.card import make_card, name_of
from draftsmith.record import read_record, write_json
from draftsmith.report.data import read_optional

KEPT = ("*.safetensors", "config.json", "contract.json", "*.index.json")
"""What an exported drafter is made of; records and logs, which name this machine, stay here."""
STAGES = ("capture", "train", "export", "bench")
TOKEN = "HF_TOKEN"


def is_repository(destination: str) -> bool:
    """Whether it is owner/name on a hub and no folder: paths begin with a dot, a slash or a tilde, or are there."""
    plain = not destination.startswith((".", "/", "~")) and destination.count("/") == 1
    return plain and all(destination.split("/")) and not Path(destination).exists()


def drafter_of(source: Path) -> tuple[Path, Path | None]:
    """(the exported drafter's folder, the run's folder if there is one) of either. UserError where there is none."""
    if (source / "config.json").is_file() and any(source.glob("*.safetensors")):
        run = source.parent.parent if source.parent.name == "export" else None
        return source, run if run is not None and (run / "recipe.json").is_file() else None
    record = read_record(source / "export")
    if record and record.get("status") == "done":
        # by name: the run's folder may have been moved since
        folder = source / "export" / Path(str(record["result"]["folder"])).name
        if folder.is_dir():
            return folder, source
    raise UserError(
        f"{source} is neither an exported drafter nor a finished run",
        "a drafter is config.json and safetensors; a run has them in export/",
        "draftsmith export RECIPE, or give the drafter's own folder",
    )


def gather(folder: Path, run: Path | None) -> dict[str, Any]:
    """What the card is made from."""
    parts: dict[str, Any] = {"contract": read_optional(folder / "contract.json")}
    if run is not None:
        parts["records"] = {s: r for s in STAGES if (r := read_record(run / s))}
        parts["bench"] = read_optional(run / "bench" / "bench.json")
        parts["verdict"] = read_optional(run / "check" / "verdict.json")
    return parts


def stage_files(source: Path, into: Path, name: str, licence: str | None) -> list[str]:
    """Copy the drafter's files and write its card into `into`; the names, sorted. UserError where check said no."""
    folder, run = drafter_of(source)
    parts = gather(folder, run)
    if (parts.get("verdict") or {}).get("verdict") == "no":
        raise UserError(
            f"the run's check said no to {folder}",
            "whoever serves it would fail, or accept nothing",
            "see check/verdict.json; mend it and run draftsmith check again",
            Exit.NO,
        )
    for path in sorted({p for pattern in KEPT for p in folder.glob(pattern)}):
        if path.is_symlink():
            raise UserError(f"{path} is a link", "what it leads to would be given away", "copy the file itself")
        shutil.copyfile(path, into / path.name)
    contract = read_optional(into / "contract.json")
    if contract and isinstance(contract.get("target"), dict):
        contract["target"]["name"] = name_of(str(contract["target"].get("name")))
        write_json(into / "contract.json", contract)
    if parts.get("bench"):
        figures = {k: v for k, v in parts["bench"].items() if k not in ("engine", "samples")}
        write_json(into / "figures.json", json.loads(json.dumps(figures)))
    (into / "README.md").write_text(make_card(name, parts, licence), encoding="utf-8")
    return sorted(p.name for p in into.iterdir())


def to_folder(source: Path, destination: Path, licence: str | None = None) -> list[str]:
    """Write the drafter with its card; complete or not at all. UserError if something is there already."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination} is there already", "nothing is written over", "give a new folder")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".publish-") as tmp:
        made = Path(tmp) / "made"
        made.mkdir()
        names = stage_files(source, made, destination.name, licence)
        made.rename(destination)  # an empty folder there is replaced
    return names


def to_hub(source: Path, repository: str, licence: str | None = None, private: bool = True) -> str:
    """Upload as one commit to a hub repository ($HF_ENDPOINT, else huggingface.co); returns its address.

    The token is read from $HF_TOKEN alone: a login that lies on the disk is not used to publish."""
    token = os.environ.get(TOKEN)
    if not token:
        raise UserError(
            f"{TOKEN} is not set",
            "publishing needs a token that may write, and it is taken from the environment only",
            f"export {TOKEN}=…; or give a folder (./name) to look at the card first",
        )
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    from draftsmith.secrets import redact_text
    from draftsmith.target.hub import endpoint

    api = HfApi(endpoint=endpoint(), token=token)
    with tempfile.TemporaryDirectory(prefix="publish-") as tmp:
        stage_files(source, Path(tmp), repository.partition("/")[2], licence)
        try:
            api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repository, folder_path=tmp, commit_message=f"Publish {repository.partition('/')[2]}"
            )
        except (HfHubHTTPError, OSError, ValueError) as e:
            raise UserError(
                f"{endpoint()} did not take {repository}: {redact_text(str(e)).splitlines()[0]}",
                "nothing was published, or only the empty repository",
                "check the token's rights and the name (owner/name)",
                Exit.NO,
            ) from None
    return f"{endpoint()}/{repository}"
