"""The keys of a recipe as people read them, taken from its models; and the recipes that come with the package."""

from __future__ import annotations

import json
from importlib.resources import files
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from draftsmith.errors import UserError, nearest


class Key(NamedTuple):
    """One key. type and default as one would say them: "drafter or none", "null"; default "required" if it has none."""

    name: str
    type: str
    default: str
    meaning: str


class Section(NamedTuple):
    """The keys under one heading; name "" for those at the top."""

    name: str
    about: str
    keys: list[Key]


def sections() -> list[Section]:
    """Every section of a recipe with its keys, in order; the top level first."""
    from draftsmith.recipe import Recipe

    nested = {n: m for n, f in Recipe.model_fields.items() if (m := _model(f.annotation)) is not None}
    top = {n: f for n, f in Recipe.model_fields.items() if n not in nested}
    return [
        _section("", Recipe.__doc__, top),
        *(_section(n, m.__doc__, m.model_fields) for n, m in nested.items()),
    ]


def _model(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _section(name: str, about: str | None, fields: dict[str, Any]) -> Section:
    keys = []
    for n, field in fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else json.dumps(default)
        keys.append(Key(field.alias or n, words(field.annotation), shown, field.description or ""))
    return Section(name, (about or "").strip(), keys)


def words(annotation: Any) -> str:
    """A type as one would say it: `list[str]`, "chat or raw", "int or null"."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return "any"
    if annotation is NoneType:
        return "null"
    if origin is Annotated:
        return words(parts[0])
    if origin is Literal:
        return " or ".join(str(p) for p in parts)
    if origin in (list, tuple, dict):
        inside = ", ".join(words(p) for p in parts if p is not Ellipsis)
        return f"{origin.__name__}[{inside}]"
    if parts:
        return " or ".join(words(p) for p in parts)
    return str(getattr(annotation, "__name__", annotation))


def shipped(name: str) -> str:
    """The text of a recipe of the package: demo, quick, gemma3. UserError names those that there are."""
    folder = files("draftsmith") / "recipes"
    known = sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
    if name not in known:
        close = nearest(name, known)
        raise UserError(
            f"no recipe {name!r} comes with draftsmith",
            "",
            f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}",
        )
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")
