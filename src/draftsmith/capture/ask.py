"""One unit of work: a prompt and a sample, all its assistant turns, each answered by the target and turned into a row.

What an answer must satisfy before it becomes a row: the server's prompt ids are ours, ids and text say the same, and
their number is the one the server counts. Anything else is asked for again (capture/pool.py) or given up by reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

from draftsmith.capture.pool import Endpoint, FaultyAnswer, Pool
from draftsmith.capture.prompts import Message, Prompt
from draftsmith.capture.rows import Row, row_id
from draftsmith.engine.client import Answer, RefusedError
from draftsmith.errors import UserError
from draftsmith.target.tokenizer import (
    RenderError,
    TargetTokenizer,
    Thinking,
    common_length,
    template_kwargs,
    wire_messages,
)

MISMATCHES = 4
"""First answers with other prompt ids than ours after which a server is held to render otherwise (one may be a fault on
the way)."""

EMPTY, TOO_LONG, DISAGREES = "empty answer", "prompt too long", "ids and text of the answer disagree"


@dataclass(frozen=True)
class Settings:
    """How the target is asked. temperatures: sample s takes the one at s modulo their number."""

    mode: str = "chat"
    thinking: Thinking = "default"
    temperatures: tuple[float, ...] = (0.7,)
    top_p: float = 1.0
    max_tokens: int = 256
    max_prompt_tokens: int = 1024
    seed: int | None = 0
    """None: sample from the engine's own stream (see stage.seed_of)."""


class Keeper(Protocol):
    """Keeps the states of answers while they are given (extract/one_pass.py)."""

    def ask(self) -> tuple[str, dict[str, Any]]:
        """A name for one attempt, and the fields its body needs."""

    def keep(self, row: Row, name: str) -> None: ...

    def drop(self, name: str) -> None:
        """The attempt became no row."""

    def crowded(self) -> bool: ...

    def behind(self) -> bool:
        """No more should be asked for now. Raises what storing met."""

    def settled(self, rows: Sequence[Row]) -> None: ...


class GivenUp(Exception):  # noqa: N818 (no fault of ours)
    """This unit gets no rows; the text is the reason that is counted."""


@dataclass
class Turn:
    """What has been asked in one turn: the messages, and our own ids for them (None where only the server renders)."""

    messages: list[Message]
    text: str
    ids: list[int] | None


def sample_seed(seed: int, prompt_id: str, sample: int, turn: int) -> int:
    """A 31-bit sampling seed that is the same for the same unit in every run."""
    digest = sha256(f"{seed}/{prompt_id}/{sample}/{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def _plain(text: str) -> str:
    return re.sub(r"[\s�]+", "", text)


class Asker:
    """Asks units. tokenizer None: it cannot be loaded here, and the server's own /tokenize renders.

    continues(endpoint) notes are made through `pool.ui`."""

    def __init__(
        self, pool: Pool, settings: Settings, tokenizer: TargetTokenizer | None, keeper: Keeper | None = None
    ) -> None:
        self.pool, self.settings, self.tokenizer, self.keeper = pool, settings, tokenizer, keeper
        self.prompt_tokens = self.answer_tokens = 0
        self.cut_chains = 0

    # -- a whole unit -----------------------------------------------------------------------------------------

    async def unit(self, prompt: Prompt, sample: int) -> list[Row]:
        """The rows of one (prompt, sample), one an assistant turn. Raises GivenUp with the reason if the first turn
        gives none; later turns that fail end the chain."""
        rows: list[Row] = []
        history: list[Message] = []
        own = not any(m["role"] == "tool" or m.get("tool_calls") for m in prompt.messages)
        at = 0
        for turn, point in enumerate(prompt.points):
            history += prompt.messages[at:point]
            try:
                row, answer = await self._turn(prompt, sample, turn, history)
            except GivenUp:
                if not rows:
                    raise
                self.cut_chains += 1
                break
            rows.append(row)
            if answer.finish_reason == "length" and point < len(prompt.messages):
                self.cut_chains += 1  # what follows a cut answer would follow it at no inference
                break
            if point < len(prompt.messages):
                # with tools the given turns stay: their results would not fit another answer
                reply = {"role": "assistant", "content": answer.text}
                history = [*history, reply if own else prompt.messages[point]]
            at = point + 1
        return rows

    async def _turn(self, prompt: Prompt, sample: int, turn: int, messages: list[Message]) -> tuple[Row, Answer]:
        s = self.settings
        asked = self._asked(prompt, messages)
        if asked.ids is not None and len(asked.ids) > s.max_prompt_tokens:
            raise GivenUp(TOO_LONG)
        temperature = s.temperatures[sample % len(s.temperatures)]
        sampling: dict[str, Any] = {
            "max_tokens": s.max_tokens,
            "temperature": temperature,
            "top_p": s.top_p,
        }
        if s.seed is not None:
            sampling["seed"] = sample_seed(s.seed, prompt.prompt_id, sample, turn)
        if s.mode == "chat":
            if kwargs := template_kwargs(s.thinking):
                sampling["chat_template_kwargs"] = kwargs
            if prompt.tools:
                sampling["tools"] = prompt.tools

        attempts: list[str] = []

        async def request(endpoint: Endpoint) -> Answer:
            fields: dict[str, Any] = {}
            if self.keeper is not None:
                name, fields = self.keeper.ask()  # a name per attempt
                attempts.append(name)
            if s.mode == "chat":
                answer = await endpoint.client.chat(wire_messages(asked.messages), **sampling, **fields)
            else:
                answer = await endpoint.client.complete(asked.text, **sampling, **fields)
            await self._believe(endpoint, asked, answer)
            return answer

        kept = None
        try:
            endpoint, answer = await self.pool.ask(request)
            if len(answer.prompt_token_ids) > s.max_prompt_tokens:
                raise GivenUp(TOO_LONG)
            if not (answer.text.strip() or answer.reasoning.strip() or answer.finish_reason == "tool_calls"):
                raise GivenUp(EMPTY)
            kept = attempts[-1] if attempts else None
        except RefusedError as e:
            raise GivenUp(_refusal(e)) from None
        except FaultyAnswer as e:
            raise GivenUp(str(e)) from None
        finally:
            for name in attempts:
                if self.keeper is not None and name != kept:
                    self.keeper.drop(name)
        self.prompt_tokens += len(answer.prompt_token_ids)
        self.answer_tokens += len(answer.token_ids)
        row = Row(
            row_id=row_id(prompt.prompt_id, sample, turn),
            prompt_id=prompt.prompt_id,
            sample=sample,
            turn=turn,
            source=prompt.source,
            token_ids=answer.prompt_token_ids + answer.token_ids,
            boundary=len(answer.prompt_token_ids),
            finish_reason=answer.finish_reason,
            thinking=s.thinking,
            temperature=temperature,
            top_p=s.top_p,
            server_model=answer.model or endpoint.model,
            answer_text=answer.text,
        )
        if self.keeper is not None and kept is not None:
            self.keeper.keep(row, kept)
        return row, answer

    def _asked(self, prompt: Prompt, messages: list[Message]) -> Turn:
        if self.settings.mode == "raw":
            text = "\n\n".join(str(m["content"]) for m in messages)
            ids = self.tokenizer.encode(text, special=True) if self.tokenizer else None
            return Turn(messages, text, ids)
        if self.tokenizer is None:
            return Turn(messages, "", None)
        try:
            ids = self.tokenizer.render(messages, self.settings.thinking, tools=prompt.tools)
        except RenderError as e:
            raise GivenUp(f"the template refuses it ({str(e)[:60]})") from None
        return Turn(messages, "", ids)

    # -- is it right? -----------------------------------------------------------------------------------------

    async def _believe(self, endpoint: Endpoint, asked: Turn, answer: Answer) -> None:
        if not answer.prompt_token_ids or (not answer.token_ids and answer.text):
            raise NoIdsError(endpoint.url)
        if asked.ids is None and not endpoint.verified:
            fields: dict[str, Any] = {"chat_template_kwargs": template_kwargs(self.settings.thinking)}
            if self.settings.mode == "chat":
                asked.ids = await endpoint.client.tokenize(wire_messages(asked.messages), **fields)
            else:
                asked.ids = await endpoint.client.tokenize(asked.text)
        if asked.ids is not None and asked.ids != answer.prompt_token_ids:
            if not endpoint.verified:
                endpoint.mismatches += 1
                if endpoint.mismatches >= MISMATCHES:
                    raise DifferentIdsError(endpoint.url, asked.ids, answer.prompt_token_ids, self.tokenizer)
            raise FaultyAnswer("prompt ids differ from ours")
        endpoint.verified = True
        if answer.finish_reason not in ("stop", "length", "tool_calls", "function_call"):
            raise FaultyAnswer(f"finish reason {answer.finish_reason or 'none'!r}")
        counted = answer.usage.get("completion_tokens", len(answer.token_ids))
        if counted != len(answer.token_ids):
            raise FaultyAnswer(DISAGREES)
        if self.tokenizer is not None:
            said = _plain(self.tokenizer.inner.decode(answer.token_ids, skip_special_tokens=True))
            if _plain(answer.text) not in said or _plain(answer.reasoning) not in said:
                raise FaultyAnswer(DISAGREES)


def _refusal(e: RefusedError) -> str:
    text = e.message.lower()
    if "maximum context length" in text or "max_model_len" in text or "context length" in text:
        return TOO_LONG
    return f"refused by the server ({e.status} {e.message[:60]})"


class NoIdsError(Exception):
    """The server gives no token ids."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.block = UserError(
            f"{url} answers without token ids",
            "re-tokenised text loses the ids that the target wrote; a drafter trained on them learns another model",
            "use a vLLM server from 0.11 on (it knows `return_token_ids`)",
        )


class DifferentIdsError(Exception):
    """The first row's prompt ids differ between server and our rendering."""

    def __init__(self, url: str, ours: list[int], theirs: list[int], tokenizer: TargetTokenizer | None) -> None:
        super().__init__(url)
        at = common_length(ours, theirs)

        def show(ids: list[int]) -> str:
            part = ids[max(0, at - 3) : at + 5]
            return f"{part}" + (f" {tokenizer.decode(part)!r}" if tokenizer else "")

        self.block = UserError(
            f"{url} renders the first prompt otherwise than the target's folder: at token {at} of {len(theirs)} it has "
            f"{show(theirs)}, we have {show(ours)}",
            "the drafter would be trained on a format that is never served",
            "serve the same model, tokenizer and chat template as target.model (also --chat-template and the thinking "
            "switch: capture.thinking)",
        )
