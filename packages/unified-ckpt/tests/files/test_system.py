import os
import random
import re
from pathlib import Path

import pytest

from unified_ckpt.files import OpenFolder
from unified_ckpt.files import system as files
from unified_ckpt.files.system import (
    exchange,
    free_bytes,
    make_folders,
    open_for_write,
    read_at,
    remove_tree,
    write_at,
)


def test_many_buffers_of_any_length_are_written_and_read_in_order(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    buffers = [rng.randbytes(rng.choice([0, 1, 7, 300])) for _ in range(2500)]
    with open_for_write(tmp_path / "x") as fd:
        write_at(fd, buffers, 5)
    data = b"".join(buffers)
    assert (tmp_path / "x").read_bytes() == bytes(5) + data, seed
    out = [memoryview(bytearray(len(b))) for b in buffers]
    with OpenFolder(tmp_path).open("x") as fd:
        assert read_at(fd, out, 5) == len(data)
        assert b"".join(bytes(o) for o in out) == data, seed
        assert read_at(fd, [memoryview(bytearray(100))], len(data)) == 5


def test_partial_reads_and_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, bs, at: real_write(fd, [bytes(bs[0][:3])], at))
    monkeypatch.setattr(os, "preadv", lambda fd, bs, at: real_read(fd, [bs[0][:2]], at))
    with open_for_write(tmp_path / "x") as fd:
        write_at(fd, [b"hello ", b"", b"wide", b" world"], 0)
    out = memoryview(bytearray(16))
    with OpenFolder(tmp_path).open("x") as fd:
        assert read_at(fd, [out[:5], out[5:]], 0) == 16
    assert bytes(out) == b"hello wide world"


def test_exchange_swaps_two_directories(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "nothing")


def test_folders_are_made_with_their_parents_and_may_exist(tmp_path: Path) -> None:
    make_folders(tmp_path / "a" / "b")
    make_folders(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert free_bytes(tmp_path) > 0


def test_of_a_link_to_a_folder_only_the_link_is_removed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").touch()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "inside").symlink_to(tmp_path / "kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path / "link")
    remove_tree(tmp_path / "tree")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["kept", "kept/x"]


def test_only_one_module_changes_the_file_system() -> None:
    """What the record of a power loss would miss: a change that another module makes by itself."""
    change = re.compile(
        r"(os|shutil)\.(fsync|mkdir|makedirs|rename|replace|unlink|remove|rmdir|rmtree|copy\w*|move)"
        r"|\.(mkdir|unlink|rmdir|touch|write_text|write_bytes)\("
    )
    for path in Path(files.__file__).parents[1].rglob("*.py"):
        if path.name != "system.py":
            lines = [line.partition("#")[0] for line in path.read_text().splitlines()]
            assert not [line for line in lines if change.search(line)], path
