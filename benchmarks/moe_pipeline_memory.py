"""What a forward of the experts keeps for its backward, against the floor and transformers.

Counted are the elements of the tensors that autograd saves, by saved-tensor hooks: each storage
once, parameters not. The floor is the input, the output of the first projection and the routing
(order and weight of each routed row). Deterministic: one run is enough.

    python benchmarks/moe_pipeline_memory.py
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from moe_pipeline.config import MoEConfig
from moe_pipeline.experts import token_experts_function
from moe_pipeline.layer import MoELayer

SHAPES = {"e8k2": (1024, 8, 2, 512, 1024), "e64k8": (1024, 64, 8, 512, 192)}
PEERS = ("eager", "grouped_mm")


def saved_elements(forward: Callable[[], object], module: torch.nn.Module) -> int:
    """Elements that are kept by `forward`'s graph, parameters apart."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, int] = {}
    kept = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in parameters:
            kept.append(tensor)
            storages[place] = max(storages.get(place, 0), tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept.append(forward())
    return sum(storages.values())


def measure(name: str) -> list[dict[str, object]]:
    tokens, experts, choices, hidden, intermediate = SHAPES[name]
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": choices,
    }
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, norm_topk_prob=True)
    theirs = Qwen3MoeSparseMoeBlock(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    layer = MoELayer(MoEConfig(**sizes))
    layer.load_state_dict(theirs.state_dict(), strict=False)
    x = torch.randn(tokens, hidden, requires_grad=True)
    with torch.no_grad():
        _, weights, idx = theirs.gate(x)
    weights.requires_grad_()
    held = layer.experts

    def peer(implementation: str) -> int:
        config._experts_implementation = implementation
        return saved_elements(lambda: theirs.experts(x, idx, weights), theirs)

    peers = {implementation: peer(implementation) for implementation in PEERS}
    best = min(peers, key=peers.__getitem__)
    rows = tokens * choices
    counts = {
        "experts": saved_elements(
            lambda: token_experts_function(x, idx, weights, held.weights, held.config.experts),
            layer,
        ),
        "layer": saved_elements(lambda: layer(x), layer),
    }
    floor = tokens * hidden + rows * 2 * intermediate + 2 * rows
    lines = []
    for what, count in counts.items():
        for reference, elements in (("floor", floor), (best, peers[best])):
            over = "over_floor" if reference == "floor" else "over_peer"
            lines.append(
                {
                    "figure": f"moe_saved_{what}_{over}_{name}",
                    "value": round(count / elements, 4),
                    "low": round(count / elements, 4),
                    "high": round(count / elements, 4),
                    "unit": "x",
                    "n": 1,
                    "peer": reference,
                    "per_routed_row": round(count / rows, 2),
                }
            )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=list(SHAPES))
    arguments = parser.parse_args(argv)
    for name in SHAPES:
        if arguments.case in (None, name):
            for line in measure(name):
                print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
