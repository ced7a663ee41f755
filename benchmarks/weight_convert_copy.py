"""What a conversion costs beyond copying the same bytes, and that its memory does not grow.

Makes a random Qwen3-MoE checkpoint (2.4 GB; per-expert, bf16) without torch, then, interleaved:

    fuse   `convert --to fused`        in a fresh process, durable (fsync) like any output of it
    split  `convert --to transformers` the inverse, of the fused files
    cp     `cp -r` of the source, then fsync of the copies

All three move the same bytes. The first round only warms up; each further one gives a ratio. The
last lines are JSON, one a figure: wall of fuse and of split over wall of cp (median), and by how
much the peak memory (VmHWM) of the converting process grows, at most, from a model of a quarter of
the size to this one, and how large it is then.

Works in shared memory when that has 9 GB to spare, where the disk hides nothing; name another place
with --folder.

    python benchmarks/weight_convert_copy.py [--rounds 9] [--folder DIR]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NUM_EXPERTS, ROWS, COLUMNS = 64, 384, 1024  # 0.75 MiB a tensor, 144 MiB a layer
CONVERT = """
import sys
from weight_convert import convert, get_spec
convert(sys.argv[1], sys.argv[2], spec=get_spec("qwen3_moe"), to=sys.argv[3])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def write_model(folder: Path, num_layers: int) -> None:
    """Write per-expert files as transformers lays them out, one a layer, of random bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", "num_experts": NUM_EXPERTS})
    )
    weight_map: dict[str, str] = {}
    shapes = {
        "gate_proj": (ROWS, COLUMNS),
        "up_proj": (ROWS, COLUMNS),
        "down_proj": (COLUMNS, ROWS),
    }
    size_bytes = 2 * ROWS * COLUMNS
    for layer in range(num_layers):
        name = f"model-{layer + 1:05d}-of-{num_layers:05d}.safetensors"
        keys = sorted(
            f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
            for expert in range(NUM_EXPERTS)
            for part in shapes
        )
        fields = {
            key: {
                "dtype": "BF16",
                "shape": shapes[key.split(".")[-2]],
                "data_offsets": [number * size_bytes, (number + 1) * size_bytes],
            }
            for number, key in enumerate(keys)
        }
        head = json.dumps(fields).encode()
        with (folder / name).open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for _ in keys:
                file.write(os.urandom(size_bytes))
        weight_map |= dict.fromkeys(keys, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def convert(src: Path, dst: Path, to: str) -> int:
    """Convert in a fresh process, with compiled modules, as installed; return its peak in KiB."""
    command = [sys.executable, "-c", CONVERT, str(src), str(dst), to]
    env = dict(os.environ, PYTHONPYCACHEPREFIX=str(src.parent / "compiled"))
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return int(done.stdout)


def copy(src: Path, dst: Path) -> None:
    """Copy with `cp` and make the copies durable, as the conversion does."""
    subprocess.run(["cp", "-r", str(src), str(dst)], check=True)
    for path in [*dst.iterdir(), dst]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def timed(job: Callable[[], object], output: Path) -> float:
    """Return the seconds of a job; its output is removed before and after, outside the time."""
    shutil.rmtree(output, ignore_errors=True)
    os.sync()
    started_s = time.perf_counter()
    job()
    wall_s = time.perf_counter() - started_s
    shutil.rmtree(output)
    return wall_s


def measure_memory(folder: Path, num_layers: int) -> tuple[list[float], list[float]]:
    """Return the growth of peak memory and its end in MiB, for fusing and for splitting."""
    growth, ends = [], []
    for to in ("fused", "transformers"):
        peaks = []
        for layers in (max(1, num_layers // 4), num_layers):
            source, other, out = (folder / name for name in ("m", "other", "out"))
            write_model(source, layers)
            if to == "transformers":
                convert(source, other, "fused")
                shutil.rmtree(source)
                source = other
            peaks.append(convert(source, out, to) / 1024)
            shutil.rmtree(source)
            shutil.rmtree(out)
        print(f"{to}: peak memory {peaks[0]:.1f} -> {peaks[1]:.1f} MiB")
        growth.append(peaks[1] - peaks[0])
        ends.append(peaks[1])
    return growth, ends


def measure_time(folder: Path, num_layers: int, num_rounds: int) -> dict[str, list[float]]:
    """Return the ratios to `cp` of each round, for fusing and for splitting."""
    large, fused, out = (folder / name for name in ("large", "fused", "out"))
    write_model(large, num_layers)
    convert(large, fused, "fused")
    jobs: dict[str, Callable[[], object]] = {
        "cp": lambda: copy(large, out),
        "fuse": lambda: convert(large, out, "fused"),
        "split": lambda: convert(fused, out, "transformers"),
    }
    ratios: dict[str, list[float]] = {"fuse": [], "split": []}
    for number in range(num_rounds + 1):
        order = list(jobs)[number % 3 :] + list(jobs)[: number % 3]
        wall_s = {job: timed(jobs[job], out) for job in order}
        print({job: round(wall_s[job], 3) for job in jobs})
        for job, values in ratios.items():
            values.append(wall_s[job] / wall_s["cp"])
    return {job: values[1:] for job, values in ratios.items()}


def roomy_folder() -> Path | None:
    """Return shared memory when it has 9 GB to spare, else None for the temporary folder."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and shutil.disk_usage(shared).free > 9e9 else None


def report(figure: str, value: float, values: list[float], unit: str) -> None:
    """Print one figure."""
    numbers = {
        "value": round(value, 3),
        "unit": unit,
        "low": round(min(values), 3),
        "high": round(max(values), 3),
        "n": len(values),
    }
    print(json.dumps({"figure": f"weight_convert_{figure}", **numbers}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=16, help="144 MiB each")
    parser.add_argument("--folder", type=Path, default=roomy_folder(), help="where to work")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        growth, peaks = measure_memory(Path(name), args.layers)
        ratios = measure_time(Path(name), args.layers, args.rounds)
    report("memory_growth", max(growth), growth, "MiB")
    report("memory_peak", max(peaks), peaks, "MiB")
    for job, values in ratios.items():
        report(f"{job}_vs_cp", statistics.median(values), values, "x")


if __name__ == "__main__":
    main()
