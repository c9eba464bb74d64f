"""train.context_parallel: who shares a pack with whom, and when it is refused."""

import pytest
from test_loop import section

from draftsmith.errors import UserError
from draftsmith.pipeline import open_run
from draftsmith.recipe import load_recipe
from draftsmith.train import parallel
from draftsmith.train.parallel import Place, Ranks
from draftsmith.train.stage import STAGE
from draftsmith.ui import QuietUi


def test_without_it_every_rank_takes_its_own_pack():
    assert Place.of(Ranks(3, 4), section(), "cpu") == Place(3, 4, None)


@pytest.mark.parametrize("count", [1, 3])
def test_a_number_that_does_not_divide_the_ranks_is_refused(count):
    with pytest.raises(UserError, match=f"context_parallel is 2, but {count} process"):
        Place.of(Ranks(0, count), section(context_parallel=2), "cpu")


def test_a_stream_is_refused():
    with pytest.raises(UserError, match=r"train\.stream is 'memory'"):
        Place.of(Ranks(0, 4), section(context_parallel=2, stream="memory"), "cpu")


def test_neighbours_share_a_pack(monkeypatch):
    class Groups:
        def get_group(self, name):
            return name

    monkeypatch.setattr(parallel, "context_groups", lambda device, size: Groups())
    places = [Place.of(Ranks(r, 6), section(context_parallel=3), "cpu") for r in range(6)]
    assert [(p.data, p.packs, p.exchange.rank, p.exchange.count) for p in places] == [
        (r // 3, 2, r % 3, 3) for r in range(6)
    ]


def test_a_run_stays_what_it_is_however_its_packs_are_shared(recipe):
    def key(**changes):
        return STAGE.key(open_run(load_recipe(recipe, changes), QuietUi()))[0]

    assert key() == key(**{"train.context_parallel": 2})
    assert key() != key(**{"train.batch_tokens": 128})
