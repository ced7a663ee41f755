"""A linear merge of two models: CPU time against mergekit's, and memory at two sizes.

    uv run --group peers python benchmarks/weight_convert_merge.py [--small 0.15 --rounds 1]

Random Qwen3-MoE models in bfloat16, in files of 250 MB. Each merge runs in a fresh process; rounds
alternate. CPU time is the growth from the smaller size (in GiB) to the larger one, so that imports
cancel. Memory is the peak of anonymous memory, sampled every 2 ms: above that after imports, and
its growth as a part of all and in MiB. The plan grows, some 2 KB for each tensor of the output.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROWS, COLUMNS, NUM_EXPERTS = 768, 2048, 16
LAYER_BYTES = 2 * 3 * NUM_EXPERTS * ROWS * COLUMNS
MERGE = """
import sys, threading, time, torch
import weight_convert.compute
from weight_convert import merge
from weight_convert.merging import read_config
def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024
begin, peak, done = anonymous(), [0.0], threading.Event()
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
merge(read_config(sys.argv[1]), sys.argv[2])
done.set()
watcher.join()
print(begin, peak[0])
"""
YAML = """
merge_method: linear
dtype: bfloat16
models:
  - {{model: {a}, parameters: {{weight: 0.3}}}}
  - {{model: {b}, parameters: {{weight: 0.7}}}}
"""
TOML = """
method = "linear"
models = [{{ path = "{a}", weight = 0.3 }}, {{ path = "{b}", weight = 0.7 }}]
"""


def make_model(folder: Path, num_layers: int, seed: int) -> None:
    """Write a model of random experts, one layer a file."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.Qwen3MoeConfig(
        hidden_size=COLUMNS,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        head_dim=8,
        intermediate_size=ROWS,
        moe_intermediate_size=ROWS,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    weight_map: dict[str, str] = {}
    shards: dict[int, dict[str, torch.Tensor]] = {layer: {} for layer in range(num_layers)}
    for key, parameter in model.state_dict().items():
        layer = int(key.split(".")[2]) if key.startswith("model.layers.") else 0
        if ".experts." in key:
            names = ("gate", "up") if "gate_up" in key else ("down",)
            shape = (ROWS, COLUMNS) if "gate_up" in key else (COLUMNS, ROWS)
            stem = key.rpartition(".")[0]
            for expert in range(NUM_EXPERTS):
                for name in names:
                    shards[layer][f"{stem}.{expert}.{name}_proj.weight"] = values(*shape)
        else:
            shards[layer][key] = values(*parameter.shape)
    for layer, tensors in shards.items():
        name = f"model-{layer + 1:05d}-of-{num_layers:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cpu_and_output(command: list[str]) -> tuple[float, str]:
    """CPU seconds of a process and its children, and what it printed."""
    script = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], check=True, capture_output=True, text=True)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime)\n"
        "print(done.stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command], check=True, capture_output=True, text=True
    )
    first, _, rest = done.stdout.partition("\n")
    return float(first), rest


def ours(folder: Path) -> tuple[float, float, float]:
    """CPU seconds, MiB after imports, and MiB at the peak."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, "-c", MERGE, str(folder / "m.toml"), str(Path(out) / "merged")]
        spent_s, printed = cpu_and_output(command)
    begin_mib, peak_mib = map(float, printed.split())
    return spent_s, begin_mib, peak_mib


def theirs(folder: Path) -> tuple[float, float, float]:
    """CPU seconds of mergekit."""
    tool = str(Path(sys.executable).with_name("mergekit-yaml"))
    with tempfile.TemporaryDirectory(dir=folder) as out:
        merged = str(Path(out) / "merged")
        options = ["--out-shard-size", "250M", "--no-copy-tokenizer", "--quiet"]
        spent_s, _ = cpu_and_output([tool, str(folder / "m.yaml"), merged, *options])
    return spent_s, 0.0, 0.0


def prepared(folder: Path, size_gib: float) -> Path:
    """Two models of a size, and the descriptions of their merge."""
    num_layers = max(1, round(size_gib * 2**30 / LAYER_BYTES))
    places = {}
    for seed, name in enumerate("ab"):
        places[name] = folder / name
        places[name].mkdir(parents=True)
        make_model(places[name], num_layers, seed)
    (folder / "m.toml").write_text(TOML.format(**places))
    (folder / "m.yaml").write_text(YAML.format(**places))
    return folder


def figure(name: str, values: list[float], unit: str) -> None:
    """Print a figure of some rounds."""
    middle = statistics.median(values)
    found = {"figure": name, "value": middle, "unit": unit, "n": len(values)}
    print(json.dumps(found | {"low": min(values), "high": max(values)}))


def main() -> None:
    """Merge in turn and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", type=float, default=0.6)
    parser.add_argument("--large", type=float, default=2.4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-peer", action="store_true")
    arguments = parser.parse_args()
    runs: dict[str, Callable[[Path], tuple[float, float, float]]] = {"ours": ours, "theirs": theirs}
    if arguments.without_peer:
        del runs["theirs"]
    ratios, peaks, growths, grown = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="weight-convert-merge-") as name:
        small = prepared(Path(name) / "small", arguments.small)
        large = prepared(Path(name) / "large", arguments.large)
        for _ in range(arguments.rounds):
            found = {}
            for run in random.sample(list(runs), len(runs)):
                found[run] = runs[run](small), runs[run](large)
            (small_s, small_begin, small_mib), (large_s, large_begin, large_mib) = found["ours"]
            peaks.append(max(small_mib - small_begin, large_mib - large_begin))
            growths.append(large_mib / small_mib)
            grown.append(large_mib - large_begin - small_mib + small_begin)
            if "theirs" in found:
                (their_small_s, *_), (their_large_s, *_) = found["theirs"]
                ratios.append((large_s - small_s) / (their_large_s - their_small_s))
    if ratios:
        figure("weight_convert_merge_cpu", ratios, "x")
    figure("weight_convert_merge_memory", peaks, "MiB")
    figure("weight_convert_merge_memory_growth", growths, "x")
    figure("weight_convert_merge_memory_more", grown, "MiB")


if __name__ == "__main__":
    main()
