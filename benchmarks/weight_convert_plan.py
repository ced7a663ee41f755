"""What planning a conversion of 100,000 tensors costs: seconds of CPU, and peak memory.

Writes headers alone: files of a Qwen3-MoE with 65 layers of 512 experts, whose data are holes of a
sparse file. A fresh process reads the directory and plans the way to `fused`, as a dry run does.

    python benchmarks/weight_convert_plan.py [--layers 65]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_EXPERTS, ROWS, COLUMNS = 512, 4, 8
SHAPES = {"gate_proj": (ROWS, COLUMNS), "up_proj": (ROWS, COLUMNS), "down_proj": (COLUMNS, ROWS)}
PLAN = """
import sys, time
from weight_convert import convert
begin_s = time.process_time()
report = convert(sys.argv[1], sys.argv[2], to="fused", dry_run=True)
spent_s = time.process_time() - begin_s
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(report.num_source_tensors, spent_s, int(peak) / 1024)
"""


def write_headers(folder: Path, num_layers: int) -> None:
    """Write one file a layer, of headers and holes, and the index."""
    config = {"model_type": "qwen3_moe", "num_experts": NUM_EXPERTS}
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    for layer in range(num_layers):
        name = f"model-{layer + 1:05d}-of-{num_layers:05d}.safetensors"
        keys = [
            f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
            for expert in range(NUM_EXPERTS)
            for part in SHAPES
        ]
        size_bytes = 2 * ROWS * COLUMNS
        fields = {
            key: {
                "dtype": "BF16",
                "shape": SHAPES[key.split(".")[-2]],
                "data_offsets": [number * size_bytes, (number + 1) * size_bytes],
            }
            for number, key in enumerate(keys)
        }
        head = json.dumps(fields).encode()
        with (folder / name).open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(8 + len(head) + len(keys) * size_bytes)
        weight_map |= dict.fromkeys(keys, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    """Plan once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=66)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_headers(Path(name), args.layers)
        command = [sys.executable, "-c", PLAN, name, f"{name}.out"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    tensors, spent_s, peak_mib = done.stdout.split()
    print(f"{tensors} tensors: {float(spent_s):.2f} s of CPU, {float(peak_mib):.0f} MiB at most")
    for figure, value, unit in (("cpu", spent_s, "s"), ("peak", peak_mib, "MiB")):
        numbers = {"value": float(value), "unit": unit}
        print(json.dumps({"figure": f"weight_convert_plan_{figure}", **numbers}))


if __name__ == "__main__":
    main()
