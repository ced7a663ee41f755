"""What a store is told of the bytes that it gets: how many it may hold at once."""

from collections.abc import Iterable
from pathlib import Path

import torch

from unified_ckpt import load, save
from unified_ckpt.files import Buffer
from unified_ckpt.files.storage import LocalStore, Location, StagedBuffers

MIB = 1 << 20


class Recording(LocalStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.uploads: dict[str, tuple[bool, list[int]]] = {}

    def upload(self, key: str, buffers: Iterable[Buffer], *, num_bytes: int) -> None:
        given = list(buffers)
        is_staged = isinstance(buffers, StagedBuffers)
        self.uploads[key.rpartition("/")[2]] = is_staged, [len(buffer) for buffer in given]
        super().upload(key, given, num_bytes=num_bytes)


def test_views_of_the_state_are_sent_in_parts_and_copies_are_told_from_them(tmp_path: Path) -> None:
    whole = torch.arange(3 * MIB, dtype=torch.int32).view(3, MIB)
    for name, tensor, is_staged in (("plain", whole, False), ("strided", whole.t(), True)):
        store = Recording(tmp_path)
        place = Location(store=store, key=name)
        save({"model": {"w": tensor}}, checkpoint_id=place)
        told, (header, *parts) = store.uploads["model.safetensors"]
        assert told is is_staged and header < 1000
        assert parts == [5 * MIB, 5 * MIB, 2 * MIB]
        again = torch.zeros_like(tensor)
        load({"model": {"w": again}}, checkpoint_id=place)
        assert torch.equal(again, tensor)
