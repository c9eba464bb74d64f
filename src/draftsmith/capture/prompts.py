"""A prompt, and how one is made from whatever a data file holds: messages, ShareGPT turns, plain texts.

    load_prompts("mt_bench:40")          a held-out set, for measuring
    load_prompts("my_prompts.jsonl")     any JSONL, JSON array or parquet

A record that cannot be used is a `Dropped` with its reason in words, so that it can be counted; a role that is not known
is refused by name, since dropping it silently has emptied whole data sets.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from draftsmith.errors import UserError

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
"""Names under which roles come (OpenAI, ShareGPT, OpenAssistant, Gemma), and ours."""

CONVERSATION = ("messages", "conversations", "conversation", "dialog", "chat")
PLAIN = ("prompt", "question", "instruction", "query", "text", "input")

KEPT = ("tool_calls", "tool_call_id", "name")
"""Keys of a message that go to the template beside role and content."""


@dataclass(frozen=True)
class Logged:
    """What a log says about its last answer. prompt_ids, answer_ids: token ids where the server gave them, else empty."""

    finish_reason: str = ""
    model: str = ""
    prompt_ids: tuple[int, ...] = ()
    answer_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A conversation to be answered. prompt_id: content hash, 16 hex digits. messages: in order, with the roles system,
    user, assistant, tool; every assistant turn in it, and its end if that is no assistant turn, is answered by the
    target. source: name of the set. tools: function descriptions handed to the template. logged: for records of a server's log."""

    prompt_id: str
    source: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    logged: Logged | None = None

    @property
    def first_user(self) -> str:
        """The first user turn, by which held-out prompts are recognised."""
        return next((str(m["content"]) for m in self.messages if m["role"] == "user"), "")

    @property
    def points(self) -> list[int]:
        """For each turn to be answered, how many messages come before it."""
        out = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        if self.messages and self.messages[-1]["role"] != "assistant":
            out.append(len(self.messages))
        return out


@dataclass(frozen=True)
class Dropped:
    """A record that is left out, and why (few words; they are counted)."""

    reason: str


@dataclass(frozen=True)
class Rules:
    """How records are read. assistant_role: a further name for the assistant. drop_images: take the text of messages
    with images (the target must be text-only). system: put before every conversation that has no system turn.
    first_turn: keep the first user turn only."""

    assistant_role: str | None = None
    drop_images: bool = False
    system: str | None = None
    first_turn: bool = False
    roles: dict[str, str] = field(default_factory=lambda: dict(ROLES))

    def role(self, name: Any, where: str) -> str:
        if isinstance(name, str):
            if name == self.assistant_role:
                return "assistant"
            found = self.roles.get(name.strip().lower())
            if found:
                return found
        raise UserError(
            f"{where}: role {name!r} is not known",
            "rows with it would be left out silently; a whole set can vanish so",
            f"if it is the model's own name, say so: --assistant-role {name}",
        )


def make_prompt(messages: list[Message], source: str, tools: list[dict[str, Any]] | None = None) -> Prompt:
    """A Prompt with its content hash."""
    text = json.dumps([messages, tools], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return Prompt(sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16], source, messages, tools)


def first_turn_hash(text: str) -> int:
    """64-bit hash of a first user turn, deaf to case and white space."""
    normal = re.sub(r"\s+", " ", text).strip().casefold()
    return int.from_bytes(sha256(normal.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def _text_of(content: Any, rules: Rules) -> str | Dropped:
    """The text of a message's content, which may be a list of parts (OpenAI)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (int, float)):
        return str(content)
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        return Dropped(f"content is a {type(content).__name__}")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and (part.get("type") or "").startswith(("image", "input_image", "video", "audio")):
            if not rules.drop_images:
                return Dropped("has images")
        else:
            return Dropped("content part of an unknown kind")
    return "\n".join(texts)


def _conversation(turns: list[Any], rules: Rules, where: str) -> list[Message] | Dropped:
    out: list[Message] = []
    for turn in turns:
        if not isinstance(turn, dict):
            return Dropped("turn is no mapping")
        name = turn.get("role", turn.get("from"))
        role = rules.role(name, where)
        content = _text_of(turn.get("content", turn.get("value")), rules)
        if isinstance(content, Dropped):
            return content
        if (turn.get("image") or turn.get("images")) and not rules.drop_images:
            return Dropped("has images")
        kept = {k: turn[k] for k in KEPT if turn.get(k)}
        out.append({"role": role, "content": content, **kept})
    return out


def read_record(record: Any, source: str, rules: Rules, where: str) -> Prompt | Dropped:
    """A Prompt from one record of a file. where: "file:line", for messages. UserError only for an unknown role."""
    if isinstance(record, str):
        record = {"prompt": record}
    if not isinstance(record, dict):
        return Dropped(f"record is a {type(record).__name__}")
    if (record.get("image") or record.get("images")) and not rules.drop_images:
        return Dropped("has images")
    if "response" in record and isinstance(record.get("request", record.get("body")), dict):
        return _read_log(record, source, rules, where)
    found: list[Message] | Dropped | None = None
    for key in CONVERSATION:
        if isinstance(record.get(key), list):
            found = _conversation(record[key], rules, where)
            break
    if found is None and isinstance(record.get("prompt"), list):
        found = _conversation(record["prompt"], rules, where)
    if found is None and isinstance(record.get("turns"), list):  # MT-bench: the user's turns alone
        found = [
            m
            for t in record["turns"]
            for m in ({"role": "user", "content": str(t)}, {"role": "assistant", "content": ""})
        ]
        found = found[:-1]
    if found is None:
        plain = next((k for k in PLAIN if isinstance(record.get(k), str)), None)
        if plain is None:
            return Dropped("no messages and no prompt")
        text = record[plain]
        if plain == "instruction" and isinstance(record.get("input"), str) and record["input"].strip():
            text = f"{text}\n\n{record['input']}"
        found = [{"role": "user", "content": text}]
    if isinstance(found, Dropped):
        return found
    if (
        isinstance(record.get("system"), str)
        and record["system"].strip()
        and (not found or found[0]["role"] != "system")
    ):
        found = [{"role": "system", "content": record["system"]}, *found]
    return finish(found, source, rules, record.get("tools"))


def _read_log(record: dict[str, Any], source: str, rules: Rules, where: str) -> Prompt | Dropped:
    """A request and its response (OpenAI's form; the batch API nests both in "body")."""
    request, response = record.get("request", record.get("body")), record["response"]
    request = request.get("body", request) if isinstance(request, dict) else {}
    response = response.get("body", response) if isinstance(response, dict) else {}
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(request.get("messages"), list):
        return Dropped("logged request without messages")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0].get("message"), dict):
        return Dropped("logged response without a message")
    choice = choices[0]
    talk = _conversation([*request["messages"], {"role": "assistant", **choice["message"]}], rules, where)
    if isinstance(talk, Dropped):
        return talk
    made = finish(talk, source, rules, request.get("tools"))
    if isinstance(made, Dropped):
        return made
    logged = Logged(
        str(choice.get("finish_reason") or ""),
        str(response.get("model") or request.get("model") or ""),
        tuple(response.get("prompt_token_ids") or choice.get("prompt_token_ids") or ()),
        tuple(choice.get("token_ids") or ()),
    )
    return Prompt(made.prompt_id, made.source, made.messages, made.tools, logged)


def finish(messages: list[Message], source: str, rules: Rules, tools: Any = None) -> Prompt | Dropped:
    """The last checks that a template would otherwise make its own way: order and emptiness."""
    talk = [m for m in messages if m["role"] != "system"]
    if not any(m["role"] == "user" for m in talk):
        return Dropped("no user turn")
    if talk[0]["role"] == "assistant":
        return Dropped("starts with the assistant")
    if not str(talk[0]["content"]).strip():
        return Dropped("empty first turn")
    if rules.first_turn:
        at = next(i for i, m in enumerate(messages) if m["role"] == "user")
        messages = messages[: at + 1]
    if rules.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": rules.system}, *messages]
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            return Dropped("tools are not JSON")
    if tools is not None and not isinstance(tools, list):
        return Dropped("tools are no list")
    return make_prompt(messages, source, tools or None)


def load_prompts(spec: str, rules: Rules | None = None) -> list[Prompt]:
    """All usable prompts of one source, e.g. "mt_bench:40", "humaneval", "my.jsonl:100": the first COUNT, in file order.

    UserError for a source that does not exist or holds broken lines, and where nothing usable is left."""
    from draftsmith.capture.sources import open_source

    source = open_source(spec)
    out, seen = [], set()
    for item in source.prompts(rules or Rules()):
        if isinstance(item, Dropped) or item.prompt_id in seen:
            continue
        seen.add(item.prompt_id)
        out.append(item)
        if source.count is not None and len(out) == source.count:
            break
    if not out:
        raise UserError(f"{spec} holds no usable prompt", "", "see the forms that are read: draftsmith capture --help")
    return out
