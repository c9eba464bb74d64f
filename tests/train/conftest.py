"""Fixtures of tiny random drafters and packed batches (tiny_drafters.py)."""

import pytest
from tiny_drafters import document, tiny_drafter, tiny_head

from draftsmith.train.batch import join


@pytest.fixture
def drafter():
    return tiny_drafter()


@pytest.fixture
def head(drafter):
    return tiny_head(drafter)


@pytest.fixture
def batch():
    return join([document(9, 3, 0), document(2, 1, 1), document(14, 6, 2)], pad_to=28)
