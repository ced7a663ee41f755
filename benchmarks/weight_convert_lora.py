"""Adapters merged by weight-convert and by peft: the largest difference, of all tensors and models.

    uv run --group peers python benchmarks/weight_convert_lora.py --models 20

Random Qwen3-MoE models of 12 experts, in float32 and bfloat16; LoRA, rsLoRA and DoRA of attention,
ranks and alphas by pattern, and LoRA and rsLoRA of fused experts. peft's `merge_and_unload` is the
oracle. The figure counts tensors that differ in a single bit. Then an adapter is extracted from
each model and its merged one, which peft loads and merges to the same bits as weight-convert.
"""

import argparse
import json
import random
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file

from weight_convert import convert, lora
from weight_convert.adapters import extract_lora


def make_model(folder: Path, dtype: torch.dtype) -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        head_dim=8,
        moe_intermediate_size=random.choice([16, 20]),
        num_experts=12,
        num_experts_per_tok=2,
    )
    transformers.Qwen3MoeForCausalLM(config).to(dtype).save_pretrained(folder)


def merged_by_peft(model: Path, adapter: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Train nothing: draw an adapter, save it, and merge it."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    is_fused = random.random() < 0.5
    config = peft.LoraConfig(
        r=random.randint(1, 5),
        lora_alpha=random.randint(1, 9),
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if is_fused else [],
        use_rslora=random.random() < 0.5,
        use_dora=not is_fused and random.random() < 0.5,
        rank_pattern={} if is_fused else {"q_proj": 2},
        alpha_pattern={} if is_fused else {"1.self_attn.q_proj": 7},
    )
    tuned = peft.get_peft_model(base, config)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    tuned.save_pretrained(adapter)
    return dict(tuned.merge_and_unload().state_dict())


def loaded_by_peft(model: Path, adapter: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Merge an adapter of a directory by peft."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return dict(peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict())


def count_differing(folder: Path, dtype: torch.dtype) -> tuple[int, int]:
    """(tensors, of them differing) of one random model, an adapter, and one extracted again."""
    make_model(folder / "model", dtype)
    expected = merged_by_peft(folder / "model", folder / "lora", dtype)
    convert(folder / "model", folder / "fused", to="fused")
    lora(folder / "fused", folder / "lora", folder / "merged")
    extract_lora(folder / "fused", folder / "merged", folder / "extracted", rank=5)
    lora(folder / "fused", folder / "extracted", folder / "again")
    first = differing_tensors(folder / "merged", expected)
    again = differing_tensors(
        folder / "again", loaded_by_peft(folder / "model", folder / "extracted", dtype)
    )
    return first[0] + again[0], first[1] + again[1]


def differing_tensors(folder: Path, expected: dict[str, torch.Tensor]) -> tuple[int, int]:
    """(tensors, of them differing from what was expected) of a model's one file."""
    found = load_file(folder / "model.safetensors")
    missing = found.keys() ^ expected.keys()
    differing = sum(
        found[key].dtype != expected[key].dtype or not torch.equal(found[key], expected[key])
        for key in found.keys() & expected.keys()
    )
    return len(found), differing + len(missing)


def main() -> None:
    """Merge, compare and print the figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    total = differing = 0
    for number in range(arguments.models):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        with tempfile.TemporaryDirectory(prefix="weight-convert-lora-") as folder:
            tensors, wrong = count_differing(Path(folder), dtype)
        total, differing = total + tensors, differing + wrong
    print(f"seed {arguments.seed}: {total} tensors", file=sys.stderr)
    figure = {"figure": "weight_convert_lora_differing", "value": differing, "unit": "tensors"}
    print(json.dumps(figure | {"n": arguments.models, "low": differing, "high": differing}))


if __name__ == "__main__":
    main()
