"""Signs of life over a real store, given by threads."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from unified_ckpt.saving.commit.signs import Signs


class NeverEnds(dist.Work):
    """A collective whose peer is gone without a word."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        raise RuntimeError("the limit has passed")


@pytest.fixture
def store() -> Iterator[dist.Store]:
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield made
    del made


def signs(store: dist.Store | None, rank: int, about: str = "save") -> Signs:
    return Signs(store, ranks=[4, 5, 6], rank=rank, about=about)


def test_who_waits_is_not_silent_and_is_told_who_is(store: dist.Store) -> None:
    told: list[str] = []

    def wait() -> None:
        other = dist.TCPStore("127.0.0.1", store.port, is_master=False)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError) as error:
            signs(other, 1).wait(NeverEnds(), 60.0)
        told.append(str(error.value))

    thread = threading.Thread(target=wait)
    thread.start()
    assert signs(store, 0).find_silent() == [2]
    thread.join()
    assert told == ["another rank has found out that it comes to no end"]
    assert signs(store, 1).find_silent() == [2]  # at once, from what is known


def test_what_was_found_is_of_one_wait_and_never_of_the_rank_that_asks(store: dist.Store) -> None:
    store.set("unified-ckpt/4-5-6/silent/save", f'{{"silent": [1], "said_s": {time.time()}}}')
    assert signs(store, 2).find_silent() == [1]
    assert signs(store, 0, "another save")._known() is None
    assert signs(store, 1)._known() is None
    store.set("unified-ckpt/4-5-6/silent/save", '{"silent": [1], "said_s": 5}')
    assert signs(store, 2)._known() is None


def test_without_a_store_a_wait_ends_at_its_limit() -> None:
    with pytest.raises(RuntimeError, match="the limit has passed"):
        signs(None, 0).wait(NeverEnds(), 0.05)
