"""The cache is handed over by the name that the installed transformers knows."""

from __future__ import annotations

from typing import Any

from draftsmith.target.cache import cache_word


class Older:
    def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...


class Newer:
    def forward(self, input_ids: Any, cache: Any = None, past_key_values: Any = None) -> None: ...


def test_the_newer_name_is_taken_where_it_is_known() -> None:
    assert cache_word(Older()) == "past_key_values"
    assert cache_word(Newer()) == "cache"
