"""Random programs: none that ends is called stuck at any time, each that does not is in the end."""

import math
import random

import pytest

from devicetest.nccl.referee import Comm, Item, Part, Referee
from devicetest.nccl.verdict import find_stuck

Step = tuple[str, tuple[Part, ...], bool]  # lane, what is launched at once, whether the host waits


def random_programs(
    rng: random.Random, ranks: int, *, ordered: bool, pairs: bool
) -> list[list[Step]]:
    """What each rank calls; all have one order of the transfers if they are `ordered`."""
    programs: list[list[Step]] = [[] for _ in range(ranks)]
    for _ in range(rng.randrange(3, 14)):
        if rng.random() < 0.2:
            for program in programs:
                program.append(("", (Part(kind="barrier", chunks=(b"",)),), rng.random() < 0.5))
            continue
        src, dst = rng.sample(range(ranks), 2)
        size = rng.choice((8, 100))
        lane = f"{min(src, dst)}-{max(src, dst)}" if pairs else ""
        send = Part(kind="send", peer=dst, num_bytes=size, chunks=(bytes(size),))
        receive = Part(kind="recv", peer=src, num_bytes=size)
        programs[src].append((lane, (send,), rng.random() < 0.4))
        programs[dst].append((lane, (receive,), rng.random() < 0.4))
    if not ordered:
        rank = rng.randrange(ranks)
        receives = [i for i, step in enumerate(programs[rank]) if step[1][0].kind == "recv"]
        if receives:  # a receive that comes too late
            programs[rank].append(programs[rank].pop(rng.choice(receives)))
    return programs


def run(
    rng: random.Random, programs: list[list[Step]], buffer_bytes: float
) -> tuple[bool, list[str]]:
    """Whether all came to an end, and the verdict after each step."""
    referee, verdicts = Referee(), []
    comm = Comm(name="c", ranks=tuple(range(len(programs))), buffer_bytes=buffer_bytes)
    at, waits, ended, numbers = [0] * len(programs), {}, set(), iter(range(10**6))
    while True:
        ended |= {item.number for item in referee.done}
        referee.done.clear()
        waits = {rank: number for rank, number in waits.items() if number not in ended}
        done = {rank for rank in range(len(programs)) if at[rank] == len(programs[rank])}
        held = {rank: {number} for rank, number in waits.items()}
        verdicts.append(find_stuck(referee, waiting=held, gone=done - set(waits)))
        able = [rank for rank in range(len(programs)) if rank not in waits and rank not in done]
        if not able:
            return not any(referee.items()), verdicts
        rank = rng.choice(able)
        lane, parts, blocks = programs[rank][at[rank]]
        at[rank] += 1
        number = next(numbers)
        item = Item(number=number, rank=rank, comm=comm, lane=lane, parts=parts, where="t.py:1")
        referee.post(item)
        if referee.fault:
            return False, [*verdicts, referee.fault]
        if blocks:
            waits[rank] = number


@pytest.mark.parametrize("pairs", [True, False])
def test_what_is_called_stuck_is_so_and_nothing_else(pairs: bool) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    stuck = 0
    for _ in range(150):
        ordered, buffer_bytes = rng.random() < 0.5, rng.choice((0, 8, math.inf))
        programs = random_programs(rng, rng.randrange(2, 5), ordered=ordered, pairs=pairs)
        ends, verdicts = run(rng, programs, buffer_bytes)
        assert ends or not ordered
        assert bool(verdicts[-1]) != ends
        assert not (ends and any(verdicts))
        stuck += not ends
    assert stuck > 0
