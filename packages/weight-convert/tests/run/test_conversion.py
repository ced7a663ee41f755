import json
import os
import random
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from weight_convert.errors import (
    CorruptFileError,
    IncompleteExpertsError,
    TargetExistsError,
    WeightConvertError,
)
from weight_convert.plan import ConversionOptions
from weight_convert.run import convert
from weight_convert.specs import get_spec

SPEC = get_spec("qwen3_moe")


def limit(max_shard_bytes: int) -> ConversionOptions:
    return ConversionOptions(max_shard_bytes=max_shard_bytes)


def sizes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F32"])
@pytest.mark.parametrize("to", ["transformers", "fused"])
@pytest.mark.parametrize("max_shard_bytes", [1, 900, 10**9])
def test_output_holds_the_tensors_that_numpy_makes(
    oracle: Any, tmp_path: Path, dtype: str, to: str, max_shard_bytes: int
) -> None:
    model = oracle.make_model(num_layers=3, dtype=dtype)
    form = "fused" if to == "transformers" else "transformers"
    src = model.write(tmp_path / "src", form, num_files=3)
    report = convert(
        src,
        tmp_path / "dst",
        spec=SPEC,
        to=to,
        options=limit(max_shard_bytes),
    )
    expected = model.fused if to == "fused" else model.per_expert
    assert oracle.read_folder(tmp_path / "dst") == expected, model.seed
    assert dict(report.files) == sizes(tmp_path / "dst")
    assert report.num_tensors == len(expected)
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]


@pytest.mark.parametrize("form", ["transformers", "fused"])
def test_there_and_back_gives_the_same_tensors(oracle: Any, tmp_path: Path, form: str) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    model = oracle.make_model(
        num_layers=rng.randint(2, 4),
        num_experts=rng.randint(1, 23),
        h=rng.randint(0, 9),
        d=rng.randint(0, 9),
    )
    src = model.write(tmp_path / "a", form, num_files=rng.randint(1, 5))
    there, back = "fused", "transformers"
    if form == "fused":
        there, back = back, there
    convert(
        src,
        tmp_path / "b",
        spec=SPEC,
        to=there,
        options=limit(rng.randint(1, 5000)),
    )
    convert(tmp_path / "b", tmp_path / "c", spec=SPEC, to=back)
    expected = model.per_expert if form == "transformers" else model.fused
    assert oracle.read_folder(tmp_path / "c") == expected, (seed, model.seed)


def test_converting_twice_gives_the_same_files(model: Any, tmp_path: Path) -> None:
    a = model.write(tmp_path / "a", "transformers", num_files=3)
    for name in ("b", "c"):
        convert(
            a,
            tmp_path / name,
            spec=SPEC,
            to="fused",
            options=limit(2000),
        )
    for name in sizes(tmp_path / "b"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_tensors_are_aligned_and_metadata_and_other_files_carried(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    src = model.write(tmp_path / "src", "transformers", num_files=2)
    (src / "templates").mkdir()
    (src / "templates" / "chat.jinja").write_text("{{ x }}")
    (src / "manifest.json").write_text("{}")
    report = convert(src, tmp_path / "dst", spec=SPEC, to="fused")
    dst = tmp_path / "dst"
    for name in ("config.json", "tokenizer.json", "templates/chat.jinja"):
        assert (dst / name).read_bytes() == (src / name).read_bytes()
    assert not (dst / "manifest.json").exists()
    assert [item.name for item in report.left_out] == ["manifest.json"]
    content = (dst / "model.safetensors").read_bytes()
    assert int.from_bytes(content[:8], "little") % 8 == 0
    assert content[8:].startswith(b'{"__metadata__":{"format":"pt"}')
    assert not (dst / "model.safetensors.index.json").exists()


def test_a_dry_run_predicts_every_file_exactly_and_writes_nothing(
    model: Any, tmp_path: Path
) -> None:
    src = model.write(tmp_path / "src", "transformers", num_files=2)
    planned = convert(
        src,
        tmp_path / "dst",
        spec=SPEC,
        to="fused",
        options=limit(900),
        dry_run=True,
    )
    assert os.listdir(tmp_path) == ["src"]
    done = convert(src, tmp_path / "dst", spec=SPEC, to="fused", options=limit(900))
    assert dict(planned.files) == dict(done.files) == sizes(tmp_path / "dst")
    assert planned.total_bytes == sum(sizes(tmp_path / "dst").values())
    assert planned.data_bytes == sum(len(data) for _, _, data in model.fused.values())
    assert (planned.dry_run, done.dry_run) == (True, False)


def test_progress_counts_up_to_all_bytes(model: Any, tmp_path: Path) -> None:
    src = model.write(tmp_path / "src", "transformers", num_files=2)
    seen: list[tuple[int, int]] = []
    report = convert(
        src,
        tmp_path / "dst",
        spec=SPEC,
        to="fused",
        options=limit(900),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {report.total_bytes}
    assert seen[-1][0] == report.total_bytes


def test_an_existing_target_is_refused_before_anything_is_read(model: Any, tmp_path: Path) -> None:
    src = model.write(tmp_path / "src", "transformers")
    (tmp_path / "dst").mkdir()
    for target in (tmp_path / "dst", src):
        with pytest.raises(TargetExistsError, match="exists; choose another target"):
            convert(src, target, spec=SPEC, to="fused")
    with pytest.raises(TargetExistsError):
        convert(tmp_path / "absent", tmp_path / "dst", spec=SPEC, to="fused")
    assert list((tmp_path / "dst").iterdir()) == []
    convert(src, tmp_path / "dst", spec=SPEC, to="fused", dry_run=True)


def test_missing_experts_leave_nothing_behind(oracle: Any, model: Any, tmp_path: Path) -> None:
    del model.per_expert["model.layers.1.mlp.experts.7.down_proj.weight"]
    src = model.write(tmp_path / "src", "transformers")
    with pytest.raises(IncompleteExpertsError, match="missing 7"):
        convert(src, tmp_path / "deep" / "dst", spec=SPEC, to="fused")
    assert os.listdir(tmp_path) == ["src"]


def test_a_truncated_shard_leaves_nothing_behind(model: Any, tmp_path: Path) -> None:
    src = model.write(tmp_path / "src", "transformers", num_files=2)
    shard = src / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CorruptFileError, match=r"00002-of-00002\.safetensors is truncated"):
        convert(src, tmp_path / "dst", spec=SPEC, to="fused")
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "tokenizer.json"])
def test_a_source_that_shrinks_meanwhile_leaves_nothing_behind(
    model: Any, tmp_path: Path, name: str
) -> None:
    src = model.write(tmp_path / "src", "transformers", num_files=2)

    def shrink(done: int, total: int) -> None:
        os.truncate(src / name, 10)

    with pytest.raises(CorruptFileError, match=f"{name} (ended at|had)"):
        convert(src, tmp_path / "dst", spec=SPEC, to="fused", on_progress=shrink)
    assert os.listdir(tmp_path) == ["src"]


def test_a_disk_without_room_is_noticed_before_writing(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = model.write(tmp_path / "src", "transformers")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9, 9, 100))
    with pytest.raises(WeightConvertError, match="has 100 bytes free, the output needs"):
        convert(src, tmp_path / "new" / "dst", spec=SPEC, to="fused")
    assert os.listdir(tmp_path) == ["src"]


def test_a_kill_at_any_moment_leaves_no_output_and_the_next_run_succeeds(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    src = model.write(tmp_path / "src", "transformers", num_files=2)
    code = (
        "import os, signal, sys\n"
        "from weight_convert import ConversionOptions, convert, get_spec\n"
        "left = int(sys.argv[3])\n"
        "def count(done, total):\n"
        "    global left\n"
        "    left -= 1\n"
        "    if left < 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert(sys.argv[1], sys.argv[2], spec=get_spec('qwen3_moe'), to='fused',\n"
        "        options=ConversionOptions(max_shard_bytes=900), on_progress=count)"
    )
    after = random.randrange(30)
    for moment in (0, after):
        command = [sys.executable, "-c", code, str(src), str(tmp_path / "dst"), str(moment)]
        assert subprocess.run(command, timeout=60).returncode == -9, after
        assert not (tmp_path / "dst").exists()
    convert(src, tmp_path / "dst", spec=SPEC, to="fused", options=limit(900))
    assert oracle.read_folder(tmp_path / "dst") == model.fused, (model.seed, after)
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]


def read_bytes() -> int:
    """What this process has read so far, by the kernel's count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def test_a_dry_run_reads_headers_alone(oracle: Any, tmp_path: Path) -> None:
    src = oracle.make_model(h=128, d=512).write(tmp_path / "src", "transformers", num_files=2)
    convert(src, tmp_path / "dst", to="fused", dry_run=True)  # the spec's file is read once
    before = read_bytes()
    report = convert(src, tmp_path / "dst", to="fused", dry_run=True)
    assert 0 < read_bytes() - before < report.total_bytes / 100


def test_parameters_are_cast_and_config_says_so_while_buffers_stay(
    oracle: Any, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    weight, bias = torch.randn(3, 5), torch.randn(4)
    raw = {
        "model.layers.0.self_attn.o_proj.weight": ("F32", (3, 5), weight.numpy().tobytes()),
        "model.layers.0.mlp.gate.e_score_correction_bias": ("F32", (4,), bias.numpy().tobytes()),
        "model.layers.0.mlp.experts.gate_up_proj": ("U8", (1, 2, 2), b"abcd"),
        "model.layers.0.mlp.experts.down_proj": ("U8", (1, 2, 2), b"abcd"),
    }
    config = {"model_type": "deepseek_v3", "n_routed_experts": 1, "torch_dtype": "float32"}
    oracle.write_folder(tmp_path / "a", [raw], config)
    options = ConversionOptions(dtype="bfloat16")
    dry = convert(tmp_path / "a", tmp_path / "b", to="fused", options=options, dry_run=True)
    done = convert(tmp_path / "a", tmp_path / "b", to="fused", options=options)
    found = oracle.read_folder(tmp_path / "b")
    half = weight.bfloat16().view(torch.int16).numpy().tobytes()
    expected = raw | {"model.layers.0.self_attn.o_proj.weight": ("BF16", (3, 5), half)}
    assert found == expected and dict(dry.files) == dict(done.files) == sizes(tmp_path / "b")
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert written["dtype"] == "bfloat16" and "torch_dtype" not in written


def test_without_torch_computing_says_what_to_install(oracle: Any, tmp_path: Path) -> None:
    oracle.make_model(dtype="F32").write(tmp_path / "a", "fused", num_files=1)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from weight_convert import ConversionOptions, WeightConvertError, convert\n"
        "try: convert('a', 'b', to='fused', options=ConversionOptions(dtype='bfloat16'))\n"
        "except WeightConvertError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "needs torch: pip install 'weight-convert[compute]'" in done.stdout, done.stderr
    assert not (tmp_path / "b").exists()
