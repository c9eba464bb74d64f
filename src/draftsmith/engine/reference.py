"""The built-in reference engine: plain transformers target, our drafter from the exported files, chain drafting, the
exact acceptance rule. For machines where no vLLM exists, and as a second opinion on one that does.

It decodes greedily, one request after another, and counts as vLLM counts. Its acceptance is what an engine without
faults must show (up to rounding); its speed says nothing about a served model. The only file of engine/ that needs
torch, imported when it is used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.engine.client import Answer, Chunk, EngineClient, Stream
from draftsmith.errors import UserError
from draftsmith.target.cache import cache_word

if TYPE_CHECKING:
    from torch import Tensor

NGRAM_SIZES = (4, 3, 2)
"""Longest first, as vLLM's ngram with prompt_lookup_max 4 and prompt_lookup_min 2."""


def ngram_proposals(ids: Sequence[int], k: int) -> list[int]:
    """Tokens that followed the last place where the text's own end stood before; [] where it never did."""
    text = list(ids)
    for n in NGRAM_SIZES:
        tail = text[-n:]
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == tail:
                return text[start + n : start + n + k]
    return []


class Counts:
    """vLLM's speculation counters."""

    def __init__(self, k: int) -> None:
        self.drafts = self.drafted = self.accepted = self.tokens = 0
        self.per_position = [0] * k

    def observe(self, drafted: int, accepted: int) -> None:
        self.drafts, self.drafted, self.accepted = self.drafts + 1, self.drafted + drafted, self.accepted + accepted
        for i in range(accepted):
            self.per_position[i] += 1

    def page(self) -> str:
        """As a Prometheus page with vLLM's names."""
        lines = [
            f"vllm:generation_tokens_total {self.tokens}",
            f"vllm:spec_decode_num_drafts_total {self.drafts}",
            f"vllm:spec_decode_num_draft_tokens_total {self.drafted}",
            f"vllm:spec_decode_num_accepted_tokens_total {self.accepted}",
        ]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        return "\n".join([*lines, *(f'{name}{{position="{i}"}} {n}' for i, n in enumerate(self.per_position))]) + "\n"


class ReferenceEngine:
    """Target and drafter in this process. way: "drafter", "ngram" or "none"; k: draft tokens per step."""

    def __init__(self, target: Path, drafter: Path | None, way: str, k: int) -> None:
        import torch

        from draftsmith.extract.transformers_backend import TransformersStates
        from draftsmith.target.tokenizer import TargetTokenizer, stop_ids

        self.way, self.k, self.counts = way, k, Counts(k)
        self.last_step = (0, 0)
        """(drafted, accepted) of the step that `generate` gave last."""
        self.tokenizer = TargetTokenizer.load(target)
        self.stops = set(stop_ids(target))
        self.model: Any = None
        aux: list[int] = []
        if way == "drafter":
            if drafter is None:
                raise UserError("the way 'drafter' needs a drafter", "", "give the exported folder")
            self.model, aux = self._load_drafter(drafter, target)
        self.states = TransformersStates(target, aux)
        self.aux = aux
        self.cache_word = cache_word(self.states.model)
        if self.model is not None:
            self.model = self.model.to(self.states.device, torch.float32)

    @staticmethod
    def _load_drafter(folder: Path, target: Path) -> tuple[Any, list[int]]:
        from draftsmith.dialects.foreign import read
        from draftsmith.drafter.model import Drafter
        from draftsmith.target.weights import read_embedding

        found = read(folder)
        if not found.config.aux_layer_ids:
            raise UserError(f"{folder} does not name its aux layers", "", "export it again")
        model = Drafter(found.config)
        dtype_free = {n: t.float() if t.is_floating_point() else t for n, t in found.tensors.items()}
        model.load_state_dict(dtype_free, strict=True)
        if model.embed_tokens is None:
            model.attach_embedding(read_embedding(target).float())
        return model.eval(), list(found.config.aux_layer_ids)

    def forward(self, ids: Sequence[int], cache: Any) -> tuple[Tensor, Tensor | None]:
        """Target over `ids` behind what `cache` holds → (logits [n, V] float32, aux states [n, A·G] or None)."""
        import torch

        caught: dict[int, Tensor] = {}
        with torch.inference_mode(), self.states._hooks(self.aux, caught):
            batch = torch.tensor([list(ids)], device=self.states.device)
            out = self.states.model(input_ids=batch, use_cache=True, **{self.cache_word: cache})
        aux = torch.cat([caught[k][0] for k in self.aux], dim=-1).float() if self.aux else None
        return out.logits[0].float(), aux

    def propose(self, ids: list[int], aux: Tensor | None) -> list[int]:
        """Up to k tokens to follow `ids`, whose last token the target has not seen yet. aux: states of all before."""
        if self.way == "none":
            return []
        if self.way == "ngram":
            return ngram_proposals(ids, self.k)
        import torch

        from draftsmith.drafter.model import Steps

        assert aux is not None and self.model is not None
        rows = len(ids) - 1
        position = torch.arange(rows, device=aux.device)
        steps = Steps(spans=[(0, rows)])
        found: list[int] = []
        with torch.inference_mode():
            state = self.model.fuse(aux)
            following = torch.tensor(ids[1:], device=aux.device)
            for s in range(self.k):
                # Row t holds the state of position t and the token after it; only the last row's chain is wanted,
                # and it sees no other row's later steps.
                normed, state = self.model.step(state, self.model.embed(following), position + s, steps)
                token = int(self.model.draft_to_target(self.model.lm_head(normed[-1:]).argmax(-1)))
                found.append(token)
                following = torch.full_like(following, token)
        return found

    def generate(self, prompt: Sequence[int], max_tokens: int, ignore_eos: bool = False) -> Iterator[list[int]]:
        """Greedy answer, one list of tokens per target step: the accepted ones and the target's own."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache()
        ids, made = list(prompt), 0
        logits, seen = self.forward(ids, cache)
        proposed: list[int] = []
        while True:
            # logits rows: after the last known token, then after each proposed one
            choices = logits[-1 - len(proposed) :].argmax(-1).tolist()
            accepted = 0
            while accepted < len(proposed) and proposed[accepted] == choices[accepted]:
                accepted += 1
            if proposed:
                self.counts.observe(len(proposed), accepted)
            new = choices[: accepted + 1]
            stop = next((i for i, t in enumerate(new) if t in self.stops and not ignore_eos), None)
            new = new[: min(len(new) if stop is None else stop + 1, max_tokens - made)]
            made += len(new)
            self.counts.tokens += len(new)
            self.last_step = (len(proposed), accepted)
            yield new
            if stop is not None or made >= max_tokens:
                return
            ids += new
            # States of rejected proposals go; the target has seen all but the newest token.
            rejected = len(proposed) - accepted
            if rejected:
                cache.crop(-rejected)
            seen = seen[: len(ids) - 1] if seen is not None else None
            proposed = self.propose(ids, seen)
            logits, more = self.forward([ids[-1], *proposed], cache)
            if seen is not None and more is not None:
                seen = torch.cat([seen, more])


class ReferenceClient(EngineClient):
    """The reference engine behind the client's own interface: one answer after another, greedy."""

    def __init__(self, engine: ReferenceEngine) -> None:
        super().__init__("http://reference.invalid", "reference")
        self.engine, self._turn = engine, asyncio.Lock()

    async def metrics(self) -> str:
        return self.engine.counts.page()

    async def health(self) -> bool:
        return True

    async def stream_chat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> Stream:
        if sampling.get("temperature", 0) > 0:
            raise UserError("the reference engine decodes greedily", "", "measure at temperature 0, or in a vLLM")
        prompt = self.engine.tokenizer.render(list(messages))
        chunks: list[Chunk] = []
        steps: list[tuple[int, int]] = []
        ids: list[int] = []
        async with self._turn:
            sent = time.perf_counter()
            for new in self.engine.generate(prompt, int(sampling["max_tokens"]), bool(sampling.get("ignore_eos"))):
                before = self.engine.tokenizer.decode(ids)
                ids += new
                text = self.engine.tokenizer.decode(ids)[len(before) :]
                chunks.append(Chunk(time.perf_counter() - sent, new, text))
                if self.engine.last_step[0]:
                    steps.append(self.engine.last_step)
            seconds = time.perf_counter() - sent
        finish = "stop" if ids and ids[-1] in self.engine.stops else "length"
        return Stream(prompt, chunks, finish, seconds, {"completion_tokens": len(ids)}, steps)

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> Answer:
        """Best tokens after a text (`logprobs=k`: as raw logits), for judging ties; one token only."""
        from transformers import DynamicCache

        ids = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        logits, _ = self.engine.forward(ids, DynamicCache())
        values, tokens = logits[-1].topk(int(sampling.get("logprobs") or 1))
        top = list(zip(tokens.tolist(), values.tolist(), strict=True))
        text = self.engine.tokenizer.decode([top[0][0]])
        return Answer(ids, [top[0][0]], text, "", "length", {"completion_tokens": 1}, "reference", [top])
