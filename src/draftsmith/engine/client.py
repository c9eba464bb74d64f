"""The client of an OpenAI-compatible server that answers with token ids (vLLM; others where they can).

Everything a caller needs to know about the wire is here: `return_token_ids`, the names under which reasoning text
comes, which failures are worth another try. Callers see `Answer`, `Stream` and two errors:
`RefusedError` (this request is wrong; others may be fine) and `UserError` (the server is gone or is no such server).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from draftsmith.engine.bounded import TooMuchError, read_lines, require_asked, token_ids, whole, within
from draftsmith.errors import UserError
from draftsmith.secrets import HIDDEN, has_userinfo
from draftsmith.secrets import redact_text as hide
from draftsmith.untrusted import parse_json

REASONING_KEYS = ("reasoning", "reasoning_content", "thinking", "thought")
"""Where servers put reasoning text: vLLM from 0.12, vLLM before and DeepSeek, others."""

RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class RefusedError(UserError):
    """The server answered this request with an error that another try would not mend (4xx). `status` is the code."""

    def __init__(self, status: int, message: str, url: str) -> None:
        super().__init__(f"{url} refused the request with {status}: {message}", "", "see the message")
        self.status, self.message = status, message


@dataclass(frozen=True)
class Answer:
    """One finished answer. `token_ids` and `prompt_token_ids` are empty where the server gives none.

    `top`: per answer token the most likely (token id, logprob) pairs, best first, if asked for with `top_logprobs`.
    `steps`: (drafted, accepted) of each verifying step, where the server counts per request
    (vLLM's --per-request-spec-decode-metrics detailed).
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    reasoning: str
    finish_reason: str
    usage: dict[str, int]
    model: str = ""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Chunk:
    """What came in one server-sent event. at: seconds since the request was sent."""

    at: float
    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Stream:
    """A streamed answer with its times. With speculation a chunk holds one engine step: 1 + accepted tokens."""

    prompt_token_ids: list[int]
    chunks: list[Chunk]
    finish_reason: str
    seconds: float
    usage: dict[str, int] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Answer tokens: by their ids, else as the server counted them."""
        return len(self.token_ids) or self.usage.get("completion_tokens", 0)

    @property
    def token_ids(self) -> list[int]:
        return [t for c in self.chunks for t in c.token_ids]

    @property
    def text(self) -> str:
        return "".join(c.text for c in self.chunks)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.chunks[0].at if self.chunks else self.seconds

    @property
    def itl(self) -> list[float]:
        """Seconds between chunks after the first."""
        return [b.at - a.at for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


def root_url(url: str) -> str:
    """http://host:port whether or not /v1 was given."""
    url = url.strip().rstrip("/")
    if has_userinfo(url):
        raise UserError(
            "the server's address holds a password",
            "it would stand in records and reports",
            "leave it out of the address and name the variable that holds the key (--api-key-env, capture.api_key_env)",
        )
    if "://" not in url:
        url = "http://" + url
    return url.removesuffix("/v1")


def _steps(found: dict[str, Any]) -> list[tuple[int, int]]:
    counts = (found.get("metrics") or {}).get("speculative_decoding") or {}
    return list(zip(counts.get("per_step_drafted") or [], counts.get("per_step_accepted") or [], strict=False))


def _reasoning(message: dict[str, Any]) -> str:
    return next((str(message[k]) for k in REASONING_KEYS if message.get(k)), "")


def _token_id(token: str) -> int:
    """ "token_id:123" (return_tokens_as_token_ids) → 123; −1 for anything else."""
    head, _, number = token.partition(":")
    return int(number) if head == "token_id" and number.isdigit() else -1


def _chat_top(logprobs: dict[str, Any] | None) -> list[list[tuple[int, float]]]:
    return [
        [(_token_id(t["token"]), float(t["logprob"])) for t in item.get("top_logprobs") or []]
        for item in (logprobs or {}).get("content") or []
    ]


def _completion_top(logprobs: dict[str, Any] | None) -> list[list[tuple[int, float]]]:
    rows = (logprobs or {}).get("top_logprobs") or []
    return [sorted(((_token_id(k), float(v)) for k, v in (row or {}).items()), key=lambda p: -p[1]) for row in rows]


class EngineClient:
    """Async client of one server; use as `async with EngineClient(url) as client`.

    url: with or without /v1. model: the served name; none = the first of /v1/models.
    retries: tries after the first, for 408, 425, 429, 5xx, resets and time-outs, waiting `backoff`·2^n seconds with
    jitter (or what Retry-After says, at most 60). on_retry(reason) is called before each wait.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        retries: int = 6,
        backoff: float = 0.5,
        connections: int = 256,
        on_retry: Callable[[str], None] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url, self._model = root_url(url), model
        self.timeout, self._key = timeout, api_key
        self.retries, self.backoff, self.on_retry = retries, backoff, on_retry
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 30.0)),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            transport=transport,
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # -- the wire ---------------------------------------------------------------------------------------------

    async def _pause(self, attempt: int, reason: str, wait: float | None = None) -> None:
        if self.on_retry:
            self.on_retry(reason)
        seconds = wait if wait is not None else self.backoff * 2**attempt * (0.5 + random.random())
        await asyncio.sleep(min(seconds, 60.0))

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        reason = ""
        for attempt in range(self.retries + 1):
            wait: float | None = None
            try:
                response = await self._whole(self._http.build_request(method, path, json=body), path)
            except httpx.TransportError as e:
                reason = f"{type(e).__name__} {e}".strip()
            else:
                if response.is_success:
                    return response
                message = self._message(response)
                if response.status_code not in RETRY_STATUS:
                    raise RefusedError(response.status_code, message, self.url + path)
                reason = f"{response.status_code} {message}"
                wait = _retry_after(response)
            if attempt < self.retries:
                await self._pause(attempt, reason, wait)
        raise self._gone(path, reason)

    async def _whole(self, request: httpx.Request, path: str) -> httpx.Response:
        """Send and read to the end, within bounds of size and time. Redirects are not followed: a server that answers
        for another is not the one that was named, and a key goes to nobody else."""
        async with within(2 * self.timeout, self.url + path):
            return await whole(await self._http.send(request, stream=True), self.url + path)

    def _message(self, response: httpx.Response) -> str:
        """What the server says is wrong, without our key, which some repeat."""
        said = _message(response)
        return hide(said.replace(self._key, HIDDEN) if self._key else said)

    def _gone(self, path: str, reason: str) -> UserError:
        return UserError(
            f"{self.url}{path} did not answer after {self.retries + 1} tries: {reason}",
            "the server is down, overloaded, or is no OpenAI-compatible server",
            "look at its log; start it again; the same command goes on from here",
        )

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = await self._request(method, path, body)
        try:
            found = parse_json(response.content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UserError(
                f"{self.url}{path} answered {response.text[:120]!r}, which is no JSON object",
                "it is no OpenAI-compatible server",
                "give the address of the server itself (http://host:port)",
            )
        return found

    # -- what a server is asked -------------------------------------------------------------------------------

    async def model(self) -> str:
        """The served name."""
        if self._model is None:
            found = await self._json("GET", "/v1/models")
            names = [str(m["id"]) for m in found.get("data") or []]
            if not names:
                raise UserError(f"{self.url}/v1/models lists no model", "", "start the server with a model")
            self._model = names[0]
        return self._model

    async def model_card(self) -> dict[str, Any]:
        """The first entry of /v1/models (vLLM: id, root, max_model_len)."""
        found = await self._json("GET", "/v1/models")
        return dict((found.get("data") or [{}])[0])

    async def health(self) -> bool:
        """True if /health answers 200; never raises, never retries."""
        try:
            return (await self._http.get("/health", timeout=5.0)).is_success
        except httpx.HTTPError:
            return False

    async def metrics(self) -> str:
        """The text of the Prometheus page."""
        return (await self._request("GET", "/metrics")).text

    async def chat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> Answer:
        """One answer to a conversation. sampling: fields of the request (max_tokens, temperature, top_p, seed,
        chat_template_kwargs, …). Token ids are always asked for."""
        body = await self._chat_body(messages, sampling)
        found = await self._json("POST", "/v1/chat/completions", body)
        choice = _choice(found, self.url)
        message = choice.get("message")
        message = message if isinstance(message, dict) else {}
        return Answer(
            prompt_token_ids=token_ids(found.get("prompt_token_ids") or choice.get("prompt_token_ids"), self.url),
            token_ids=token_ids(choice.get("token_ids"), self.url),
            text=str(message.get("content") or ""),
            reasoning=_reasoning(message),
            finish_reason=str(choice.get("finish_reason") or ""),
            usage=_usage(found),
            model=str(found.get("model") or ""),
            top=_chat_top(choice.get("logprobs")),
            steps=_steps(found),
        )

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> Answer:
        """One raw continuation of a text or of token ids. `logprobs=k` fills `Answer.top`."""
        body = await self._completion_body(prompt, sampling)
        found = await self._json("POST", "/v1/completions", body)
        choice = _choice(found, self.url)
        return Answer(
            prompt_token_ids=token_ids(choice.get("prompt_token_ids") or found.get("prompt_token_ids"), self.url),
            token_ids=token_ids(choice.get("token_ids"), self.url),
            text=str(choice.get("text") or ""),
            reasoning="",
            finish_reason=str(choice.get("finish_reason") or ""),
            usage=_usage(found),
            model=str(found.get("model") or ""),
            top=_completion_top(choice.get("logprobs")),
            steps=_steps(found),
        )

    async def _prompt_rows(self, token_ids: Sequence[int], top: int) -> list[dict[str, dict[str, Any]]]:
        """vLLM's prompt_logprobs: per position token id → {"logprob", "rank"}, the token itself always among them."""
        body = {
            "model": await self.model(),
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top,
        }
        found = _choice(await self._json("POST", "/v1/completions", body), self.url).get("prompt_logprobs")
        if not found or len(found) != len(token_ids):
            raise UserError(
                f"{self.url} gave {len(found or [])} prompt logprobs for {len(token_ids)} tokens",
                "the engine's own most likely tokens are needed to verify our states against",
                "use a vLLM server (prefix caching off), or skip the check in the recipe (extract.self_check_rows: 0)",
            )
        return [row or {} for row in found]

    async def prompt_logprobs(self, token_ids: Sequence[int], top: int = 1) -> list[list[tuple[int, float]]]:
        """For each position t the `top` most likely tokens *at* t given tokens before t, as (id, logprob), best
        first; the entry of position 0 is empty. Length = len(token_ids)."""
        rows = []
        for row in await self._prompt_rows(token_ids, top):
            ranked = sorted(row.items(), key=lambda kv: kv[1]["rank"])
            rows.append([(int(k), float(v["logprob"])) for k, v in ranked[:top]])
        return rows

    async def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """The logprob of each token of a text given those before it; 0 at position 0. Length = len(token_ids)."""
        rows = await self._prompt_rows(token_ids, 1)
        return [float(row[str(t)]["logprob"]) if row else 0.0 for t, row in zip(token_ids, rows, strict=True)]

    async def tokenize(
        self, prompt: str | Sequence[dict[str, Any]], *, add_special_tokens: bool = True, **fields: Any
    ) -> list[int]:
        """The server's own rendering: of a text, or of a conversation through its chat template."""
        body: dict[str, Any] = {"model": await self.model(), **fields}
        if isinstance(prompt, str):
            body |= {"prompt": prompt, "add_special_tokens": add_special_tokens}
        else:
            body |= {"messages": list(prompt), "add_generation_prompt": True}
        return [int(t) for t in (await self._json("POST", "/tokenize", body))["tokens"]]

    async def stream_chat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> Stream:
        """As `chat`, streamed: token ids and time of each chunk. Tried again only before the first byte (a
        second try inside would falsify the times)."""
        body = await self._chat_body(messages, sampling)
        return await self._stream("/v1/chat/completions", body)

    async def stream_complete(self, prompt: str | Sequence[int], **sampling: Any) -> Stream:
        body = await self._completion_body(prompt, sampling)
        return await self._stream("/v1/completions", body)

    async def _chat_body(self, messages: Sequence[dict[str, Any]], sampling: dict[str, Any]) -> dict[str, Any]:
        body = {"model": await self.model(), "messages": list(messages), "return_token_ids": True, **sampling}
        if body.get("top_logprobs"):
            body |= {"logprobs": True, "return_tokens_as_token_ids": True}
        return body

    async def _completion_body(self, prompt: str | Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        ids: str | list[int] = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": await self.model(), "prompt": ids, "return_token_ids": True, **sampling}
        if body.get("logprobs"):
            body["return_tokens_as_token_ids"] = True
        return body

    @asynccontextmanager
    async def _open(self, path: str, body: dict[str, Any]) -> AsyncIterator[tuple[httpx.Response, float]]:
        reason = ""
        for attempt in range(self.retries + 1):
            request = self._http.build_request("POST", path, json=body)
            sent = time.perf_counter()
            try:
                response = await self._http.send(request, stream=True)
            except httpx.TransportError as e:
                reason = f"{type(e).__name__} {e}".strip()
            else:
                if response.is_success:
                    try:
                        yield response, sent
                    finally:
                        await response.aclose()
                    return
                response = await whole(response, self.url + path)
                message = self._message(response)
                reason = f"{response.status_code} {message}"
                if response.status_code not in RETRY_STATUS:
                    raise RefusedError(response.status_code, message, self.url + path)
            if attempt < self.retries:
                await self._pause(attempt, reason)
        raise self._gone(path, reason)

    def _event(self, data: str, path: str) -> dict[str, Any]:
        try:
            event = parse_json(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise UserError(
                f"{self.url}{path} sent {data[:120]!r} in its stream, which is no JSON object",
                "it is no OpenAI-compatible server",
                "give the address of the server itself (http://host:port)",
            )
        return event

    async def _stream(self, path: str, body: dict[str, Any]) -> Stream:
        prompt_ids: list[int] = []
        chunks: list[Chunk] = []
        finish = ""
        usage: dict[str, int] = {}
        steps: list[tuple[int, int]] = []
        asked, count = body.get("max_tokens"), 0
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._open(path, body) as (response, sent):
            try:
                async for line in read_lines(response, self.url + path):
                    if time.perf_counter() - sent > 2 * self.timeout:
                        raise TooMuchError(self.url + path, f"was not done after {2 * self.timeout:,.0f} s")
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        break
                    event = self._event(data, path)
                    if "error" in event:
                        raise UserError(f"{self.url}{path} broke off: {event['error']}", "", "see the server's log")
                    usage = _usage(event) or usage
                    steps = _steps(event) or steps
                    for choice in event.get("choices") or []:
                        prompt_ids = prompt_ids or choice.get("prompt_token_ids") or event.get("prompt_token_ids") or []
                        delta = choice.get("delta") or {}
                        text = str(choice.get("text") or delta.get("content") or _reasoning(delta) or "")
                        ids = token_ids(choice.get("token_ids"), self.url + path)
                        count += len(ids)
                        require_asked(count, asked, self.url + path)
                        if ids or text:
                            chunks.append(Chunk(time.perf_counter() - sent, ids, text))
                        finish = choice.get("finish_reason") or finish
            except httpx.TransportError as e:
                raise UserError(
                    f"{self.url}{path} broke off after {len(chunks)} chunks: {type(e).__name__} {e}".strip(),
                    "a stream that breaks cannot be timed",
                    "see the server's log and start again",
                ) from None
            return Stream(list(prompt_ids), chunks, finish, time.perf_counter() - sent, usage, steps)


def _choice(found: dict[str, Any], url: str) -> dict[str, Any]:
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise UserError(f"{url} answered without a choice: {json.dumps(found)[:200]}", "", "see the server's log")
    return dict(choices[0])


def _usage(found: dict[str, Any]) -> dict[str, int]:
    return {k: v for k, v in (found.get("usage") or {}).items() if isinstance(v, int)}


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:300]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return float(value) if value.replace(".", "", 1).isdigit() else None
