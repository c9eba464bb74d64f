"""A target's tokenizer and chat template: messages in, exactly the token ids out that the engine would see.

What comes out is always a plain list of int, whatever the installed transformers returns (in release 5
`apply_chat_template` gives a mapping whose length is 2). Special tokens are never added twice: the template writes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from draftsmith.errors import UserError
from draftsmith.record import content_hash, sha256_bytes, sha256_file
from draftsmith.untrusted import read_json

Thinking = Literal["default", "on", "off"]
Message = dict[str, Any]

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
"""Files that decide which ids a text becomes; tokenizer_config.json is hashed without what does not."""

_CONFIG_KEYS = (
    "added_tokens_decoder",
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "tokenizer_class",
    "legacy",
)

TEMPLATES = ("chat_template.jinja", "chat_template.json")


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with: where two lists of them differ, or the shorter one ends."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class RenderError(Exception):
    """The chat template does not take these messages; the text is its reason."""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def tokenizer_hash(folder: Path) -> str:
    """Content hash of what turns text into ids; the chat template has its own hash."""
    config = _json(folder / "tokenizer_config.json")
    parts: dict[str, Any] = {n: sha256_file(folder / n) for n in FILES if (folder / n).is_file()}
    return content_hash(parts | {"config": {k: config[k] for k in _CONFIG_KEYS if k in config}})


def chat_template(folder: Path) -> str | None:
    """The folder's chat template (its own file first, as the engines do), or None."""
    for name in TEMPLATES:
        path = folder / name
        if path.is_file():
            return _json(path).get("chat_template") if path.suffix == ".json" else path.read_text(encoding="utf-8")
    found = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several named ones; engines take the one called default
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) and found else None


def chat_template_hash(folder: Path) -> str | None:
    """sha256 of the chat template's text; None where there is none."""
    text = chat_template(folder)
    return None if text is None else sha256_bytes(text.encode())


def stop_ids(folder: Path) -> list[int]:
    """Every id at which generation ends, ascending: `eos_token_id` of generation_config and config, one or a list."""
    from draftsmith.target.config import text_config

    config = _json(folder / "config.json")
    out: set[int] = set()
    for source in (_json(folder / "generation_config.json"), config, text_config(config)):
        value = source.get("eos_token_id")
        out |= {v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)}
    return sorted(out)


def template_kwargs(thinking: Thinking) -> dict[str, Any]:
    """What is handed to the chat template, here and to the server: the two names in use for the thinking switch
    (`enable_thinking` Qwen3, GLM; `thinking` DeepSeek, Kimi). "default" hands nothing over."""
    return {} if thinking == "default" else {"enable_thinking": thinking == "on", "thinking": thinking == "on"}


def as_ids(value: Any) -> list[int]:
    """Token ids as list[int] from a list, a mapping with `input_ids`, an encoding, an array, or a batch of one."""
    if hasattr(value, "keys") and "input_ids" in value:
        value = value["input_ids"]
    elif hasattr(value, "ids"):
        value = value.ids
    if hasattr(value, "tolist"):
        value = value.tolist()
    out = list(value)
    if len(out) == 1 and isinstance(out[0], (list, tuple)):
        out = list(out[0])
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in out):
        raise TypeError(f"not token ids: {out[:3]!r}")
    return out


def normal_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages as templates expect them: a tool call's arguments as a mapping, where they come as a JSON string."""
    out = []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                function = dict(call.get("function") or {})
                arguments = function.get("arguments")
                if isinstance(arguments, str):
                    try:
                        function["arguments"] = json.loads(arguments) if arguments.strip() else {}
                    except ValueError:
                        raise RenderError("tool call arguments are not JSON") from None
                calls.append({**call, "function": function})
            message = {**message, "tool_calls": calls}
        out.append(message)
    return out


def _plain_fast(folder: Path) -> Any | None:
    """tokenizer.json without the model's config (of a type that the installed transformers does not know), or None."""
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    except Exception:  # broken in the same way: the caller reports the first reason
        return None


def wire_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages as the chat endpoint takes them: a tool call's arguments as a JSON string, with the id and type that the
    OpenAI form asks for."""
    out = []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for i, call in enumerate(message["tool_calls"]):
                function = dict(call.get("function") or {})
                if not isinstance(function.get("arguments", ""), str):
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
                calls.append({"id": f"call_{i}", "type": "function", **call, "function": function})
            message = {**message, "tool_calls": calls}
        out.append(message)
    return out


class TargetTokenizer:
    """A loaded tokenizer with its folder. `inner` is transformers' own object."""

    def __init__(self, inner: Any, folder: Path) -> None:
        self.inner, self.folder = inner, folder

    @staticmethod
    def load(folder: Path, trust_remote_code: bool = False) -> TargetTokenizer:
        """Load from a model folder. UserError if that needs the model's own code and the flag is off, or fails."""
        from transformers import AutoTokenizer

        config = _json(folder / "tokenizer_config.json")
        remote = "AutoTokenizer" in (config.get("auto_map") or {})
        if remote and not trust_remote_code and not (folder / "tokenizer.json").is_file():
            raise UserError(
                f"the tokenizer in {folder} is Python code of the model's own ({config['auto_map']['AutoTokenizer']})",
                "code from a model folder runs with your rights",
                "set target.trust_remote_code if you trust it, or capture from a running server, which renders itself",
            )
        try:
            inner: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        except (
            Exception
        ) as e:  # whatever a foreign folder makes transformers raise; the second way or the block says it
            inner = _plain_fast(folder)
            if inner is None:
                first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
                raise UserError(
                    f"the tokenizer in {folder} cannot be loaded: {first}",
                    "prompts are rendered with it",
                    "check that tokenizer.json and tokenizer_config.json are whole",
                ) from None
        template = chat_template(folder)
        if template is not None:
            inner.chat_template = template
        return TargetTokenizer(inner, folder)

    @property
    def has_template(self) -> bool:
        return bool(self.inner.chat_template)

    def require_template(self) -> None:
        """UserError if there is no chat template: a base model is captured in raw mode or not at all."""
        if not self.has_template:
            raise UserError(
                f"{self.folder} has no chat template",
                "without one the engine refuses chat requests, and any guess would teach the drafter another format",
                "take the chat model's folder, or set capture.mode: raw to capture a base model's raw completions",
            )

    def render(
        self,
        messages: Sequence[Message],
        thinking: Thinking = "default",
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation as the engine's chat endpoint would make them.

        generation_prompt: end with the header of the answer to come. Raises RenderError with the template's reason.
        """
        from jinja2 import TemplateError

        try:
            ids = self.inner.apply_chat_template(
                normal_messages(messages),
                tools=list(tools) if tools else None,
                tokenize=True,
                add_generation_prompt=generation_prompt,
                return_dict=False,
                **template_kwargs(thinking),
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as e:
            raise RenderError(str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__) from None
        return as_ids(ids)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of plain text; `special` adds what the tokenizer puts around a raw prompt (as /v1/completions does)."""
        return as_ids(self.inner(text, add_special_tokens=special)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens written out."""
        return str(self.inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def special_ids(self) -> list[int]:
        """All added special tokens, ascending (not only bos, eos and pad)."""
        added = getattr(self.inner, "added_tokens_decoder", {})
        out = {int(i) for i, t in added.items() if getattr(t, "special", False)}
        return sorted(out | {int(i) for i in self.inner.all_special_ids})

    @cached_property
    def end_of_turn_ids(self) -> list[int]:
        """Special tokens that the template writes right after an assistant's words, in order (none without one)."""
        if not self.has_template:
            return []
        word = "zebra"
        turn = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": word}]
        try:
            ids = self.render(turn, generation_prompt=False)
        except RenderError:
            return []
        start = max((n for n in range(len(ids)) if word in self.decode(ids[n:])), default=None)
        if start is None:
            return []
        end = next(m for m in range(start + 1, len(ids) + 1) if word in self.decode(ids[start:m]))
        special = set(self.special_ids)
        return [i for i in ids[end:] if i in special]
