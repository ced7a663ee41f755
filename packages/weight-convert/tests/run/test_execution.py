import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.plan import ConversionOptions
from weight_convert.run import convert

CHILD = """
import os, signal, sys
from weight_convert import ConversionOptions, convert
src, dst, dtype = sys.argv[1:4]
chunk, shard, left, move = map(int, sys.argv[4:])
def count(done, total):
    if 0 <= left <= done: os.kill(os.getpid(), signal.SIGKILL)
print("begun", flush=True)
options = ConversionOptions(
    chunk_bytes=chunk, max_shard_bytes=shard, move=bool(move), dtype=dtype or None
)
convert(src, dst, to="fused", options=options, on_progress=count)
"""


def start(src: Path, dst: Path, options: ConversionOptions, left: int) -> subprocess.Popen[str]:
    """Begin a conversion that kills itself after `left` bytes; -1 leaves that to others."""
    numbers = (options.chunk_bytes, options.max_shard_bytes, left, int(options.move))
    command = [sys.executable, "-c", CHILD, str(src), str(dst), options.dtype or ""]
    command += map(str, numbers)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def written_bytes(dst: Path) -> int:
    """Bytes of weight files in what a killed run left."""
    partial = dst.parent / f".{dst.name}.partial"
    return sum(path.stat().st_size for path in partial.glob("*.safetensors"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


def resumed(src: Path, dst: Path, options: ConversionOptions) -> int:
    """Go on with a killed run, unless it had ended; the bytes that were written twice."""
    if dst.exists() and not (dst.parent / f".{dst.name}.journal").exists():
        return 0
    before, published = written_bytes(dst), dst.exists()
    report = convert(src, dst, to="fused", options=replace(options, resume=True))
    total = sum(size for name, size in report.files if name.endswith(".safetensors"))
    return 0 if published else before + report.copied_bytes - total


def kill_and_resume(
    folder: Path, model: Any, seed: int, *, by_time_s: float = 0.0, dtype: str | None = None
) -> int:
    """One run that is killed at a random point and resumed; the bytes written twice.

    Args:
        folder: an empty folder.
        model: the model to convert.
        seed: of the point, the sizes, and whether the source is moved.
        by_time_s: kill from outside, within this time; else at a number of bytes.
        dtype: what to cast to; a tensor is then written again whole.
    """
    rng = random.Random(seed)
    src = model.write(folder / "src", "transformers", num_files=rng.randint(1, 3))
    shard = rng.choice([10**9, 2000])
    options = ConversionOptions(
        chunk_bytes=rng.choice([256, 1000, 4096]) if by_time_s == 0.0 else 8 << 20,
        max_shard_bytes=shard,
        move=rng.random() < 0.5,
        dtype=dtype,
    )
    plain = convert(src, folder / "plain", to="fused", options=replace(options, move=False))
    unit_bytes = options.chunk_bytes
    if dtype is not None:
        unit_bytes = max(unit_bytes, *(2 * len(data) for _, _, data in model.fused.values()))
    expected = content(folder / "plain")
    left = rng.randrange(plain.total_bytes) if by_time_s == 0.0 else -1
    dst = folder / "dst"
    child = start(src, dst, options, left)
    assert child.stdout is not None
    with child, child.stdout:
        child.stdout.readline()
        if by_time_s:
            time.sleep(rng.random() * by_time_s)
            child.send_signal(signal.SIGKILL)
    assert child.returncode in (-9, 0)
    assert not dst.exists() or content(dst) == expected
    twice = resumed(src, dst, options)
    assert content(dst) == expected
    assert src.exists() == (not options.move)
    assert twice <= unit_bytes, (twice, options)
    assert [name for name in os.listdir(folder) if name.startswith(".")] == []
    return twice


def test_a_killed_run_goes_on_and_gives_the_same_files(oracle: Any, tmp_path: Path) -> None:
    for number in range(4):
        seed = random.randrange(2**32)
        model = oracle.make_model(num_layers=3)
        (tmp_path / str(number)).mkdir()
        try:
            kill_and_resume(tmp_path / str(number), model, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}, model {model.seed}")
            raise


def test_a_killed_run_that_computes_goes_on_and_gives_the_same_files(
    oracle: Any, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    seed = random.randrange(2**32)
    model = oracle.make_model(num_layers=3)
    try:
        kill_and_resume(tmp_path, model, seed, dtype="float32")
    except BaseException as error:
        error.add_note(f"seed {seed}, model {model.seed}")
        raise


def killed(model: Any, folder: Path, *, move: bool) -> tuple[Path, Path, ConversionOptions]:
    """A run that was killed after half of its bytes."""
    src, dst = model.write(folder / "src", "transformers", num_files=2), folder / "dst"
    options = ConversionOptions(chunk_bytes=512, move=move)
    total = convert(src, dst, to="fused", dry_run=True).total_bytes
    with start(src, dst, options, total // 2) as child:
        child.communicate()
    assert child.returncode == -9
    return src, dst, replace(options, resume=True)


def damage(dst: Path) -> None:
    with (dst.parent / f".{dst.name}.partial" / "model.safetensors").open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))


def test_what_has_changed_since_is_written_again(oracle: Any, model: Any, tmp_path: Path) -> None:
    src, dst, options = killed(model, tmp_path, move=False)
    damage(dst)
    convert(src, dst, to="fused", options=options)
    assert oracle.read_folder(dst) == model.fused, model.seed


def test_what_was_moved_and_has_changed_since_is_an_error(model: Any, tmp_path: Path) -> None:
    src, dst, options = killed(model, tmp_path, move=True)
    damage(dst)
    with pytest.raises(CorruptFileError, match="have changed since an earlier run moved them"):
        convert(src, dst, to="fused", options=options)
    assert not dst.exists()


def test_an_interrupted_move_is_not_begun_anew_and_its_source_not_used(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    src, dst, options = killed(model, tmp_path, move=True)
    assert not src.exists()
    for wrong in (replace(options, resume=False), replace(options, move=False)):
        with pytest.raises(WeightConvertError, match="--move and --resume"):
            convert(src, dst, to="fused", options=wrong)
    for wrong in (options, ConversionOptions()):
        with pytest.raises(WeightConvertError, match="was interrupted, and parts of it stand in"):
            convert(src, tmp_path / "other", to="fused", options=wrong)
    convert(src, dst, to="fused", options=options)
    assert oracle.read_folder(dst) == model.fused, model.seed
    assert sorted(os.listdir(tmp_path)) == ["dst"]


def test_going_on_with_another_job_is_refused(model: Any, tmp_path: Path) -> None:
    src, dst, options = killed(model, tmp_path, move=False)
    with pytest.raises(WeightConvertError, match="is of another job"):
        convert(src, dst, to="transformers", options=options)
    os.utime(src / "model-00001-of-00002.safetensors")
    with pytest.raises(WeightConvertError, match="is of another job"):
        convert(src, dst, to="fused", options=options)
    convert(src, dst, to="fused")  # anew
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]


def test_with_resume_a_failure_keeps_what_is_written(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    src, dst = model.write(tmp_path / "src", "transformers"), tmp_path / "dst"
    options = ConversionOptions(chunk_bytes=512, resume=True)

    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise OSError("no space left")

    with pytest.raises(WeightConvertError, match="no space left; what is written stays"):
        convert(src, dst, to="fused", options=options, on_progress=fail)
    assert not dst.exists()
    report = convert(src, dst, to="fused", options=options)
    assert report.copied_bytes < report.data_bytes
    assert oracle.read_folder(dst) == model.fused, model.seed


def test_a_move_frees_the_source_as_it_goes_and_gives_back_what_it_left_out(
    oracle: Any, tmp_path: Path
) -> None:
    model = oracle.make_model(h=512, d=256)
    src, dst = model.write(tmp_path / "src", "transformers"), tmp_path / "dst"
    (src / "optimizer.pt").write_bytes(b"state")
    used: list[int] = []

    def look(done: int, total: int) -> None:
        files = [path.stat() for path in tmp_path.rglob("*") if path.is_file()]
        used.append(512 * sum(state.st_blocks for state in files))

    options = ConversionOptions(chunk_bytes=1 << 20, move=True)
    report = convert(src, dst, to="fused", options=options, on_progress=look)
    assert max(used) < 1.3 * report.total_bytes
    assert oracle.read_folder(dst) == model.fused, model.seed
    assert os.listdir(src) == ["optimizer.pt"]
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]


def test_links_are_not_moved(model: Any, tmp_path: Path) -> None:
    src = model.write(tmp_path / "src", "transformers")
    (src / "model.safetensors").rename(tmp_path / "blob")
    (src / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(WeightConvertError, match="is a link"):
        convert(src, tmp_path / "dst", to="fused", options=ConversionOptions(move=True))
    assert sorted(os.listdir(tmp_path)) == ["blob", "src"]


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("link", "dst", "link is a link"),
        ("src/../src", "dst", "cannot be renamed by that name"),
        ("src", "src/dst", "src/dst is inside of .*src, which a move removes"),
        ("src", "link/dst", "link/dst is inside of .*src, which a move removes"),
    ],
)
def test_what_cannot_be_hidden_or_would_take_the_target_with_it_is_not_moved(
    model: Any, tmp_path: Path, name: str, target: str, message: str
) -> None:
    src = model.write(tmp_path / "src", "transformers")
    (tmp_path / "link").symlink_to(src)
    options = ConversionOptions(move=True)
    with pytest.raises(WeightConvertError, match=message):
        convert(tmp_path / name, tmp_path / target, to="fused", options=options)
    assert sorted(os.listdir(tmp_path)) == ["link", "src"]
    assert sorted(os.listdir(src)) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("chunk_bytes", [64, 4096])
def test_a_move_goes_on_with_chunks_of_its_size_only_and_loses_nothing_by_others(
    oracle: Any, model: Any, tmp_path: Path, chunk_bytes: int
) -> None:
    src, dst, options = killed(model, tmp_path, move=True)
    with pytest.raises(WeightConvertError, match=r"of another job: .* an option has changed"):
        convert(src, dst, to="fused", options=replace(options, chunk_bytes=chunk_bytes))
    convert(src, dst, to="fused", options=options)
    assert oracle.read_folder(dst) == model.fused, model.seed


@pytest.mark.parametrize("chunks", [(512, 1 << 20), (1 << 20, 512)])
def test_a_run_that_computes_goes_on_with_chunks_of_another_size(
    oracle: Any, tmp_path: Path, chunks: tuple[int, int]
) -> None:
    pytest.importorskip("torch")
    src, dst = oracle.make_model().write(tmp_path / "src", "transformers"), tmp_path / "dst"
    before, after = (
        ConversionOptions(chunk_bytes=size, dtype="float32", files="bin", resume=True)
        for size in chunks
    )
    convert(src, tmp_path / "plain", to="fused", options=after)

    def fail(done: int, total: int) -> None:
        if done > 0.8 * total:
            raise OSError("no space left")

    with pytest.raises(WeightConvertError, match="no space left; what is written stays"):
        convert(src, dst, to="fused", options=before, on_progress=fail)
    convert(src, dst, to="fused", options=after)
    assert content(dst) == content(tmp_path / "plain")
