"""The target in this process (plain transformers), behind the client's own interface: what capture asks where no vLLM
exists (engine.path: reference). Answers are sampled in batches; each row has a generator of its own, so that what a unit
says depends on its seed and the batch's rounding only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.engine.client import Answer, EngineClient
from draftsmith.target.cache import cache_word
from draftsmith.target.loading import bars_for_people_only
from draftsmith.target.tokenizer import TargetTokenizer, stop_ids

if TYPE_CHECKING:
    import torch

URL, MODEL = "http://reference.invalid", "transformers"


@dataclass(frozen=True)
class Wanted:
    """One request. ids: the prompt."""

    ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


def choose_tokens(
    logits: torch.Tensor, wanted: Sequence[Wanted], generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """One token per row of logits [B, V] float32: the best at temperature 0, else sampled from the top_p mass by the
    cumulative sum (searching it is several times faster than torch.multinomial on a CPU)."""
    import torch

    best = logits.argmax(-1)
    for i, (w, generator) in enumerate(zip(wanted, generators, strict=True)):
        if w.temperature <= 0:
            continue
        probabilities = torch.softmax(logits[i] / w.temperature, -1)
        if w.top_p < 1:
            ordered, where = probabilities.sort(descending=True)
            over = ordered.cumsum(-1) - ordered >= w.top_p
            probabilities[where[over]] = 0
        mass = probabilities.double().cumsum(-1)
        point = torch.rand((), generator=generator, dtype=torch.float64) * mass[-1]
        best[i] = torch.searchsorted(mass, point.reshape(1), right=True).clamp(max=len(mass) - 1)[0]
    return best


class LocalTarget:
    """The model and how it answers a batch. dtype: as the recipe's engine.dtype; "auto" is the files' own on a GPU and what
    an engine would take on a CPU, where bf16 products are often emulated at a fifth of the speed."""

    def __init__(self, folder: Path, trust_remote_code: bool = False, dtype: str = "auto") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        from draftsmith.engine.server import engine_dtype

        bars_for_people_only()
        dtype = engine_dtype(dtype) if self.device == "cpu" else dtype
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code)
        self.model = model.to(self.device)
        self.model.eval()
        self.stops = set(stop_ids(folder))
        self.cache_word = cache_word(self.model)

    def answer(self, wanted: Sequence[Wanted], tell: Callable[[str], None] | None = None) -> list[list[int]]:
        """Answer ids of each request, the stop token included where one was written. Prompts are padded on the left.
        tell: is told after each token how far the answers are."""
        import torch
        from transformers import DynamicCache

        longest = max(len(w.ids) for w in wanted)
        ids = torch.tensor([[0] * (longest - len(w.ids)) + w.ids for w in wanted], device=self.device)
        mask = torch.tensor([[0] * (longest - len(w.ids)) + [1] * len(w.ids) for w in wanted], device=self.device)
        place = (mask.cumsum(-1) - 1).clamp(min=0)
        generators = [torch.Generator().manual_seed(w.seed) for w in wanted]
        cache: Any = DynamicCache(config=self.model.config)
        out: list[list[int]] = [[] for _ in wanted]
        open_rows = set(range(len(wanted)))
        with torch.inference_mode():
            while True:
                given = {self.cache_word: cache, "use_cache": True, "logits_to_keep": 1}
                found = self.model(input_ids=ids, attention_mask=mask, position_ids=place, **given)
                chosen = choose_tokens(found.logits[:, -1].float().cpu(), wanted, generators)
                for i in sorted(open_rows):
                    token = int(chosen[i])
                    out[i].append(token)
                    if token in self.stops or len(out[i]) >= wanted[i].max_tokens:
                        open_rows.discard(i)
                if not open_rows:
                    return out
                if tell is not None:
                    tell(f"{sum(map(len, out)):,} tokens of {len(wanted)} answers in the making")
                ids = chosen.to(self.device)[:, None]
                mask = torch.cat([mask, mask.new_ones(len(wanted), 1)], 1)
                place = place[:, -1:] + 1


class LocalClient(EngineClient):
    """Capture's view of the target in this process: requests that wait together are answered together."""

    def __init__(self, target: LocalTarget, tokenizer: TargetTokenizer, batch: int = 16) -> None:
        super().__init__(URL, MODEL)
        self.target, self.tokenizer, self.batch = target, tokenizer, batch
        self.tell: Callable[[str], None] | None = None
        """Where news of a batch goes while it is being answered."""
        self._waiting: list[tuple[Wanted, asyncio.Future[list[int]]]] = []
        self._turn = asyncio.Lock()

    async def chat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> Answer:
        kwargs = sampling.get("chat_template_kwargs") or {}
        thinking = {None: "default", True: "on", False: "off"}[kwargs.get("enable_thinking")]
        ids = self.tokenizer.render(messages, thinking, tools=sampling.get("tools"))  # type: ignore[arg-type]
        return await self._answer(ids, sampling)

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> Answer:
        ids = self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        return await self._answer(ids, sampling)

    async def _answer(self, ids: list[int], sampling: dict[str, Any]) -> Answer:
        wanted = Wanted(
            ids,
            int(sampling["max_tokens"]),
            float(sampling.get("temperature", 1.0)),
            float(sampling.get("top_p", 1.0)),
            int(sampling.get("seed") or 0),
        )
        ready: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, ready))
        async with self._turn:  # whoever has the turn answers for a batch of those who wait
            if not ready.done():
                await self._serve()
        answer = await ready
        stopped = answer[-1] in self.target.stops
        text = self.tokenizer.inner.decode(answer, skip_special_tokens=True)
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(answer)}
        return Answer(ids, answer, text, "", "stop" if stopped else "length", usage, MODEL)

    async def _serve(self) -> None:
        # like lengths together cost the least padding; the longest waiting one is always in
        first, *rest = self._waiting
        rest.sort(key=lambda w: abs(len(w[0].ids) - len(first[0].ids)))
        taken = [first, *rest[: self.batch - 1]]
        self._waiting = [w for w in self._waiting if w not in taken]
        try:
            answers = await asyncio.to_thread(self.target.answer, [w for w, _ in taken], self.tell)
        except BaseException as e:
            for _, ready in taken:
                if not ready.done():
                    ready.set_exception(e)
            raise
        for (_, ready), answer in zip(taken, answers, strict=True):
            if not ready.cancelled():
                ready.set_result(answer)
