"""An OpenAI-compatible server with known latencies and counters, to hold the bench against.

Each answer of n tokens is one prefill token after `ttft` seconds, then steps every `itl` seconds; step i of a request
accepts pattern[i % len(pattern)] of `k` drafted tokens. `reset_after` answers, its counters start anew (a restart).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Token = Callable[[int], int]


class FakeEndpoint:
    """`with FakeEndpoint(pattern=[2, 0, 1]) as server: server.url`. pattern None = no speculation."""

    def __init__(
        self,
        pattern: Sequence[int] | None = (2, 0, 1),
        k: int = 3,
        ttft: float = 0.02,
        itl: float = 0.005,
        reset_after: int | None = None,
        token: Token = lambda i: 100 + i % 7,
        per_request: bool = True,
        top: Callable[[list[int]], dict[str, float]] | None = None,
        kind: str = "vllm",
    ) -> None:
        self.pattern, self.k, self.ttft, self.itl = pattern, k, ttft, itl
        self.reset_after, self.token, self.per_request, self.top, self.kind = reset_after, token, per_request, top, kind
        self.lock = threading.Lock()
        self.born = 1000.0
        self.answers = 0
        self.requests: list[dict[str, Any]] = []
        self._zero()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    return self._send(owner.metrics().encode(), "text/plain")
                if self.path == "/v1/models":
                    return self._send(json.dumps({"data": [{"id": "fake", "max_model_len": 4096}]}).encode())
                return self._send(b"{}")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.requests.append(body)
                if self.path == "/v1/completions":
                    return self._send(json.dumps(owner.completion(body)).encode())
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                for event in owner.chat(body):
                    self.wfile.write(f"data: {event}\n\n".encode())
                    self.wfile.flush()
                self.close_connection = True
                return None

            def _send(self, raw: bytes, kind: str = "application/json") -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def _zero(self) -> None:
        self.drafts = self.drafted = self.accepted = self.tokens = self.count = 0
        self.per_position = [0] * self.k

    def __enter__(self) -> FakeEndpoint:
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def metrics(self) -> str:
        with self.lock:
            if self.kind == "sglang":
                return (
                    f'sglang:generation_tokens_total{{model_name="fake"}} {self.tokens}.0\n'
                    f"sglang:num_requests_total {self.count}.0\nsglang:spec_accept_length 2.0\n"
                    f"sglang:spec_verify_calls_total {self.drafts}.0\n"
                )
            lines = [
                "# HELP vllm:generation_tokens_total x",
                f'vllm:generation_tokens_total{{engine="0",model_name="fake"}} {float(self.tokens)}',
                f'vllm:generation_tokens_created{{engine="0",model_name="fake"}} {self.born}',
                'vllm:prompt_tokens_total{engine="0"} 5.0',
            ]
            if self.pattern is not None:
                lines += [
                    f'vllm:spec_decode_num_drafts_total{{engine="0"}} {float(self.drafts)}',
                    f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {float(self.drafted)}',
                    f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {float(self.accepted)}',
                ]
                lines += [
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {float(n)}'
                    for i, n in enumerate(self.per_position)
                ]
            return "\n".join(lines) + "\n"

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        top = self.top(body["prompt"]) if self.top else {"100": 20.0, "101": 19.0}
        named = {f"token_id:{t}": v for t, v in top.items()}
        choice: dict[str, Any] = {"text": "x", "token_ids": [100], "logprobs": {"top_logprobs": [named]}}
        if body.get("prompt_logprobs"):
            scored = [{str(t): {"logprob": -float(t), "rank": 1}} for t in body["prompt"]]
            choice["prompt_logprobs"] = [None, *scored[1:]]
        return {"choices": [choice]}

    def chat(self, body: dict[str, Any]) -> list[str] | Any:
        wanted, made, step = body["max_tokens"], 0, 0
        steps: list[tuple[int, int]] = []
        time.sleep(self.ttft)
        while made < wanted:
            accepted = 0
            if made and self.pattern is not None:
                accepted = min(self.pattern[step % len(self.pattern)], wanted - made - 1)
                step += 1
                steps.append((self.k, accepted))
                with self.lock:
                    self.drafts += 1
                    self.drafted += self.k
                    self.accepted += accepted
                    for i in range(accepted):
                        self.per_position[i] += 1
            if made:
                time.sleep(self.itl)
            ids = [self.token(made + i) for i in range(accepted + 1)]
            made += len(ids)
            with self.lock:
                self.tokens += len(ids)
            choice: dict[str, Any] = {"delta": {"content": "".join(f"<{t}>" for t in ids)}, "token_ids": ids}
            event: dict[str, Any] = {"choices": [choice]}
            if made == len(ids):
                event["prompt_token_ids"] = [1, 2, 3, 4, 5]
            yield json.dumps(event)
        usage: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": made}}
        if self.per_request and steps:
            detail = {"per_step_drafted": [d for d, _ in steps], "per_step_accepted": [a for _, a in steps]}
            usage["metrics"] = {"speculative_decoding": detail}
        with self.lock:
            self.count += 1
            self.answers += 1
            if self.reset_after is not None and self.answers == self.reset_after:
                self._zero()
                self.born += 500.0
        yield json.dumps(usage)
        yield "[DONE]"
