"""Signs of life over a real store, given by threads."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from unified_ckpt.saving.commit import signs as signs_module
from unified_ckpt.saving.commit.signs import Signs, Silent


class NeverEnds(dist.Work):
    """A collective whose peer is gone without a word."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        raise RuntimeError("the limit has passed")


class Counting:
    """A store that counts the requests made through it."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*given: Any) -> Any:
            self.requests[name] += 1
            return method(*given)

        return call


@pytest.fixture
def store() -> Iterator[dist.Store]:
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield made
    del made


def signs(store: Any, rank: int, about: str = "save") -> Signs:
    return Signs(store, ranks=[4, 5, 6], rank=rank, about=about)


def come(*those: Signs, goes: bool = False) -> None:
    """Let ranks arrive, and go on or fail."""
    for one in those:
        mark = one.marked()
        mark.__enter__()
        if goes:
            mark.__exit__(None, None, None)


def test_who_waits_is_not_silent_and_is_told_who_is(store: dist.Store) -> None:
    told: list[object] = []

    def wait() -> None:
        counted = Counting(dist.TCPStore("127.0.0.1", store.port, is_master=False))  # type: ignore[attr-defined]
        waiting = signs(counted, 1)
        come(waiting)
        with pytest.raises(RuntimeError) as error:
            waiting.wait(NeverEnds(), 60.0)
        told.append(str(error.value))
        counted.requests.clear()
        told.append(waiting.find_silent())
        told.append(sum(counted.requests.values()))  # at once, from what is known

    thread = threading.Thread(target=wait)
    thread.start()
    looking = signs(store, 0)
    come(looking)
    assert looking.find_silent() == Silent(absent=[2], arrived=[])
    thread.join()
    silent = Silent(absent=[2], arrived=[])
    assert told == ["another rank has found out that it comes to no end", silent, 3]


def test_a_call_is_of_one_wait_and_what_it_found_names_no_rank_that_reads_it(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signs_module, "_QUIET_S", 1.0)
    early = signs(store, 1)
    assert early._listen(store) is None
    looking = signs(store, 0)
    come(looking)
    assert looking.find_silent().absent == [1, 2]
    assert early._listen(store) is None  # it was slow, and is not what it waits for
    assert signs(store, 1)._listen(store) is None  # the same save, tried again
    assert signs(store, 0, "another save")._listen(store) is None
    again = signs(store, 2)
    come(again)
    assert again.find_silent() == Silent(absent=[1], arrived=[0])  # a new call


def test_who_has_gone_on_is_not_named_and_who_died_is_told_from_who_never_came(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signs_module, "_QUIET_S", 1.0)
    ranks = [Signs(store, ranks=[4, 5, 6, 7], rank=rank, about="save") for rank in range(4)]
    come(*ranks, goes=True)
    come(ranks[0], ranks[2])  # the last exchange of a save: one rank finds no end
    come(ranks[1], goes=True)  # another one does, and writes for long
    assert ranks[0].find_silent() == Silent(absent=[3], arrived=[2])
    retried = [Signs(store, ranks=[4, 5, 6, 7], rank=rank, about="save") for rank in range(2)]
    come(*retried)
    assert [one.number for one in retried] == [3, 3]  # exchanges of another save of that name


def test_two_thousand_ranks_ask_the_store_little_and_none_is_named_falsely(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 5 and 2,007 are gone, 1,000 has gone on, three look, and all others wait."""
    monkeypatch.setattr(signs_module, "_QUIET_S", 1.0)
    size, gone, looking = 2048, {5, 2007}, (0, 1, 2)
    counted = [Counting(dist.PrefixStore("job", store)) for _ in range(size)]
    ranks = [
        Signs(counted[rank], ranks=list(range(size)), rank=rank, about="save")  # type: ignore[arg-type]
        for rank in range(size)
    ]
    come(*(one for rank, one in enumerate(ranks) if rank != 5))
    come(ranks[1000], goes=True)
    assert {sum(one.requests.values()) for rank, one in enumerate(counted) if rank < 5} == {2}
    for one in counted:
        one.requests.clear()
    waiting = [rank for rank in range(size) if rank not in {*gone, *looking, 1000}]
    found: dict[int, Silent] = {}

    def look(rank: int) -> None:
        found[rank] = ranks[rank].find_silent()

    threads = [threading.Thread(target=look, args=(rank,)) for rank in looking]
    for thread in threads:
        thread.start()
    polls = 0
    while any(thread.is_alive() for thread in threads):
        polls += 1
        for rank in waiting:
            ranks[rank]._listen(ranks[rank]._store)  # type: ignore[arg-type]
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(looking, Silent(absent=[5], arrived=[2007])), found
    most = max(sum(counted[rank].requests.values()) for rank in waiting)
    assert most <= 3 * polls + 2, (most, polls)
    per_look = {rank: sum(counted[rank].requests.values()) for rank in looking}
    print(f"requests of {size} ranks: a wait {most} in {polls} rounds; a look {per_look}")
    assert max(per_look.values()) < 100, per_look


def test_a_call_whose_maker_dies_is_made_by_the_next_one(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signs_module, "_QUIET_S", 0.5)
    monkeypatch.setattr(signs_module, "_NEXT_S", 1.0)
    first, second = signs(store, 0), signs(store, 1)
    come(first, second)
    monkeypatch.setattr(first, "_call", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        first.find_silent()
    assert second.find_silent() == Silent(absent=[2], arrived=[0])


def test_without_a_store_a_wait_ends_at_its_limit() -> None:
    with pytest.raises(RuntimeError, match="the limit has passed"):
        signs(None, 0).wait(NeverEnds(), 0.05)
    assert signs(None, 0).find_silent() == Silent(absent=[], arrived=[])
