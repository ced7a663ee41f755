"""`moe-train verify-layouts` on four families: are the numbers of a job those of every layout?

Random models of Mixtral, Qwen3-MoE, DeepSeek-V3 (latent attention, shared experts) and GPT-OSS
(sinks, windows, transposed experts), documents of unequal length with padding, and the balancing
loss on. Each layout trains for 20 steps; the figure is the largest relative difference of a loss or
of a gradient norm before clipping to those of one rank. Keys that change the numbers are compared
with one rank under the same key, on DeepSeek-V3: the second figure is the largest difference over
the limit that the table gives for it.

    python benchmarks/moe_train_layouts.py                     # 4 families, 24 layouts each
    python benchmarks/moe_train_layouts.py --keys              # bf16, capacity, payloads, Muon, ...
    python benchmarks/moe_train_layouts.py --layouts 3 --steps 3 --families mixtral
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from moe_train.config import load_config
from moe_train.jobs import verify_keys, verify_layouts

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "eos_token_id": 0,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.05,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "sliding_window": 7},
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 5},
}
TOML = """
model.config_file = "config.json"
data = { corpus = ["text"], extensions = [".txt"], sequence_length = 24, packing = "pad" }
tokenizer.vocab_size = 300
moe.aux_loss_coef = 0.05
optimizer = { lr = 1e-3, warmup_steps = 2 }
parallel.timeout_s = 300
log = { tensorboard = false, plots = false, progress = "off" }
[train]
output_dir = "run"
max_steps = 20
global_batch_size = 16
gradient_accumulation_steps = 2
device = "cpu"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--layouts", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--keys", action="store_true", help="only keys that change the numbers")
    arguments = parser.parse_args()
    if arguments.keys:
        return print_keys(arguments.steps)
    worst, fewest = 0.0, arguments.layouts
    for family in arguments.families:
        with tempfile.TemporaryDirectory(prefix="moe-train-layouts-") as folder:
            config = load_config(write_job(Path(folder), family))
            report = verify_layouts(
                config, max_ranks=4, count=arguments.layouts, steps=arguments.steps, limit=1e-6
            )
        print(f"\n{family}\n{report.text}", flush=True)
        worst = max(worst, *(max(run.apart(report.runs[0])) for run in report.runs))
        fewest = min(fewest, len(report.runs))
    print(f"{len(arguments.families)} families, at least {fewest} layouts of each")
    if fewest < arguments.layouts:
        sys.exit(f"fewer than {arguments.layouts} layouts fit")
    count = len(arguments.families) * fewest
    figure = {"figure": "moe_train_layouts_apart", "value": worst, "unit": "x", "n": count}
    print(json.dumps({**figure, "low": worst, "high": worst}))


def print_keys(steps: int) -> None:
    with tempfile.TemporaryDirectory(prefix="moe-train-keys-") as folder:
        config = load_config(write_job(Path(folder), "deepseek_v3"))
        reports = verify_keys(config, max_ranks=4, steps=steps, limit=1e-6)
    print("\n".join(report.text for report in reports))
    ran = [report for report in reports if not report.not_run]
    worst = max(
        found / limit
        for report in ran
        for found, limit in zip(report.apart, report.limits, strict=True)
    )
    figure = {"figure": "moe_train_keys_over_limit", "value": worst, "unit": "x", "n": len(ran)}
    print(json.dumps({**figure, "low": worst, "high": worst}))


def write_job(folder: Path, family: str) -> Path:
    sizes = {**SIZES, "model_type": family, **FAMILIES[family]}
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    words = ["def", "return", "self", "value", "for", "in", "import", "é"]
    drawn = random.Random(5)
    (folder / "text").mkdir()
    for number in range(120):
        text = " ".join(drawn.choices(words, k=drawn.randint(3, 60)))
        (folder / "text" / f"{number}.txt").write_text(text, encoding="utf-8")
    job = folder / "job.toml"
    job.write_text(TOML, encoding="utf-8")
    return job


if __name__ == "__main__":
    main()
