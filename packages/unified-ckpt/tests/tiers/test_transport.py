"""Bytes of files on their way between ranks of nodes."""

import random
from pathlib import Path

import pytest

from ranktest import collect_ranks, run_ranks
from unified_ckpt.errors import CorruptCheckpointError, SavePeerError
from unified_ckpt.tiers import transport
from unified_ckpt.tiers.transport import FileStream, Lane, lane_ends, move_lanes


def write_files(folder: Path, sizes: dict[str, int], seed: int) -> list[tuple[str, int]]:
    rng = random.Random(seed)
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(rng.randbytes(size))
    return list(sizes.items())


def test_files_count_as_one_range_of_bytes(tmp_path: Path) -> None:
    sizes = {"a": 7, "empty": 0, "deep/b": 5, "last": 0}
    files = write_files(tmp_path / "from", sizes, 1)
    source, target = FileStream(tmp_path / "from", files), FileStream(tmp_path / "to", files)
    assert source.num_bytes == 12
    target.make_files()
    for begin in (0, 3, 6, 9):
        buffer = bytearray(3)
        source.read(begin, memoryview(buffer))
        target.write(begin, memoryview(buffer))
    for name in sizes:
        assert (tmp_path / "to" / name).read_bytes() == (tmp_path / "from" / name).read_bytes()
    (tmp_path / "from" / "a").write_bytes(b"short")
    with pytest.raises(CorruptCheckpointError, match="a: is cut off"):
        source.read(4, memoryview(bytearray(3)))


def test_lanes_cover_every_byte_once_whatever_the_numbers_of_ranks() -> None:
    for senders, receivers in (((0,), (1, 2)), ((0, 1, 2), (3, 4)), ((0,), (1,))):
        ends = lane_ends(1001, senders, receivers)
        assert [begin for _, _, begin, _ in ends] == [0, *(end for *_, end in ends[:-1])]
        assert ends[-1][3] == 1001 and len({pair[:2] for pair in ends}) == len(ends)


def test_a_ring_of_uneven_nodes_moves_all_lanes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of 1, 2 and 1 ranks; each sends to the next, in many chunks that fit no file's end."""
    monkeypatch.setattr(transport, "CHUNK_BYTES", 1000)
    nodes = [(0,), (1, 2), (3,)]
    files = {
        node: write_files(tmp_path / str(node), {"x": 4001 + node, "y/z": 17, "none": 0}, node)
        for node in range(3)
    }

    def fn(rank: int, world_size: int) -> None:
        lanes = []
        for node in range(3):
            to = (node + 1) % 3
            stream = FileStream(tmp_path / str(node), files[node])
            copy = FileStream(tmp_path / f"copy-{node}", files[node])
            for sender, receiver, begin, end in lane_ends(stream.num_bytes, nodes[node], nodes[to]):
                common = {"number": node, "begin": begin, "end": end}
                if rank == sender:
                    lanes.append(Lane(stream=stream, peer=receiver, sends=True, **common))
                if rank == receiver:
                    copy.make_files()
                    lanes.append(Lane(stream=copy, peer=sender, sends=False, **common))
        move_lanes(lanes, group=None, timeout_s=60.0)

    run_ranks(fn, 4, timeout_s=120)
    for node in range(3):
        for name, _ in files[node]:
            sent = (tmp_path / str(node) / name).read_bytes()
            assert (tmp_path / f"copy-{node}" / name).read_bytes() == sent


def test_a_peer_that_does_not_come_is_named_when_the_time_is_over(tmp_path: Path) -> None:
    files = write_files(tmp_path / "from", {"a": 10}, 1)

    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            lane = Lane(
                number=0,
                stream=FileStream(tmp_path / "to", files),
                begin=0,
                end=10,
                peer=1,
                sends=False,
            )
            FileStream(tmp_path / "to", files).make_files()
            with pytest.raises(SavePeerError, match="a copy awaited from rank 1 stopped at byte 0"):
                move_lanes([lane], group=None, timeout_s=1.0)

    outcomes = collect_ranks(fn, 2, timeout_s=60)
    assert all(outcome.ok for outcome in outcomes), outcomes


def test_a_rank_that_cannot_go_on_keeps_no_peer_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was cut off at the sender: it raises, and the receiver's bytes are not right."""
    monkeypatch.setattr(transport, "CHUNK_BYTES", 1000)
    files = write_files(tmp_path / "from", {"a": 5000}, 1)
    (tmp_path / "from" / "a").write_bytes(b"x" * 1500)

    def fn(rank: int, world_size: int) -> None:
        folder = tmp_path / ("to" if rank else "from")
        stream = FileStream(folder, files)
        stream.make_files()
        lane = Lane(number=0, stream=stream, begin=0, end=5000, peer=1 - rank, sends=not rank)
        move_lanes([lane], group=None, timeout_s=50.0)

    cut, whole = collect_ranks(fn, 2, timeout_s=60)
    assert cut.error_type == "CorruptCheckpointError" and whole.ok, (cut, whole)
    assert whole.elapsed_s < 40
