"""The README's first command from end to end: how long it takes, and what the model has learnt.

Runs `moe-train train examples/python_stdlib.toml` into a fresh folder, with a cold cache, and
compares its validation loss with a unigram model of the same tokens.

    uv run python benchmarks/moe_train_example.py
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moe_train import load_config, prepare, unigram_cross_entropy
from moe_train.report.metrics import read_metrics
from moe_train.training import open_splits

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "python_stdlib.toml"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"train.output_dir={folder}/run", f"data.cache_dir={folder}/cache"]
        began = time.perf_counter()
        command = [str(Path(sys.executable).parent / "moe-train"), "train", str(EXAMPLE)]
        subprocess.run([*command, *overrides], check=True)
        minutes = (time.perf_counter() - began) / 60
        config = load_config(EXAMPLE, overrides)
        lines = list(read_metrics(Path(folder) / "run" / "metrics.jsonl"))
        validation = [line["validation_loss"] for line in lines if "validation_loss" in line][-1]
        prepared = prepare(config)
        length = config.data.sequence_length
        reset = config.data.reset_at_documents
        _, split = open_splits(config, prepared)
        used = range(min(config.train.validation_sequences, split.num_sequences))
        unigram = unigram_cross_entropy(
            prepared, length, reset_at_documents=reset, sequence_indices=list(used)
        )
    print(f"validation loss {validation:.3f} nats a token, unigram model {unigram:.3f}")
    for figure, value, unit in (
        ("example_minutes", minutes, "min"),
        ("nats_below_unigram", unigram - validation, "nats"),
    ):
        line = {"figure": figure, "value": round(value, 3), "unit": unit, "n": 1}
        print(json.dumps(line | {"low": line["value"], "high": line["value"]}))


if __name__ == "__main__":
    main()
