"""Keys and tokens: taken from the environment or the system's keyring by name, kept out of everything that is written.

A recipe never holds a secret, only the name of the variable that does; records and logs go through `redact` all the
same, since a command line may be typed in haste.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from draftsmith.errors import UserError

HIDDEN = "[hidden]"
SERVICE = "draftsmith"
"""The keyring's service under which a secret is looked up, by the variable's name."""

_NAME = re.compile(r"(?i)(^|_)(api_?key|token|secret|password|passwd|credentials?|private_?key|access_?key)$")
_FLAG = re.compile(r"(?i)^(--?[a-z0-9-]*(?:api-key|token|secret|password))(=|$)")
_KNOWN_FORM = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,})")
_USERINFO = re.compile(r"(?<=://)[^/\s@]+:[^/\s@]*@")
_SHORTEST = 8
"""Shorter values of secret-looking variables are left alone: they would black out ordinary words."""


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name is taken to hold a secret (HF_TOKEN, VLLM_API_KEY, DB_PASSWORD)."""
    return bool(_NAME.search(name.replace("-", "_")))


def has_userinfo(url: str) -> bool:
    """Whether a URL carries a password."""
    return bool(_USERINFO.search(url))


def secret(name: str) -> str | None:
    """The secret of that name: of the environment, else of the keyring where the `keyring` package is installed."""
    if found := os.environ.get(name):
        return found
    try:
        import keyring
    except ImportError:
        return None
    value = keyring.get_password(SERVICE, name)
    return str(value) if value else None


def _values(environ: Mapping[str, str]) -> list[str]:
    found = {v for k, v in environ.items() if is_secret_name(k) and len(v) >= _SHORTEST}
    return sorted(found, key=len, reverse=True)


def redact_text(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The text without values of secret-looking variables, well-known forms of tokens, and passwords in URLs."""
    for value in _values(os.environ if environ is None else environ):
        text = text.replace(value, HIDDEN)
    return _USERINFO.sub(HIDDEN + "@", _KNOWN_FORM.sub(HIDDEN, text))


def _words(words: list[Any], environ: Mapping[str, str] | None) -> list[Any]:
    """A command line: the value of --api-key and the like, in either spelling, is hidden."""
    out: list[Any] = []
    hide_next = False
    for word in words:
        if not isinstance(word, str):
            out.append(redact(word, environ))
        elif hide_next:
            out.append(HIDDEN)
        elif (found := _FLAG.match(word)) and found[2]:
            out.append(f"{found[1]}={HIDDEN}")
        elif "=" in word and is_secret_name(word.partition("=")[0].rpartition(".")[2]):
            out.append(f"{word.partition('=')[0]}={HIDDEN}")
        else:
            out.append(redact_text(word, environ))
        hide_next = isinstance(word, str) and bool((found := _FLAG.match(word)) and not found[2])
    return out


def redact(value: Any, environ: Mapping[str, str] | None = None) -> Any:
    """A JSON-able value with every secret in it hidden. Keys that look secret lose a text value, whatever it is."""
    if isinstance(value, dict):
        return {
            k: HIDDEN if isinstance(k, str) and is_secret_name(k) and isinstance(v, str) and v else redact(v, environ)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return _words(list(value), environ)
    return redact_text(value, environ) if isinstance(value, str) else value


def require_none(args: list[str], env: Mapping[str, str], where: str) -> None:
    """UserError if an engine's flags or variables, as they stand in `where`, hold a secret."""
    flags = [found[1] for a in args if (found := _FLAG.match(a))]
    names = [k for k, v in env.items() if is_secret_name(k) and v]
    if flags or names:
        raise UserError(
            f"{where} holds a secret: {', '.join([*flags, *names])}",
            "recipes and command lines end up in records, logs and process lists",
            "set it in the environment, which the engine inherits (VLLM_API_KEY for its --api-key, HF_TOKEN for the hub)",
        )
