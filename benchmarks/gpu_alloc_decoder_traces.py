"""Traces of moe-train's decoders, recorded while they train on fake tensors.

    python benchmarks/gpu_alloc_decoder_traces.py deepseek trace.jsonl [--seed 7 --steps 4]

The decoder, its backward pass and AdamW are the real ones; tensors have sizes and no memory, so
that a step of gigabytes is recorded on any machine. What needs numbers is drawn instead: how many
rows each expert gets (uneven: each layer's experts have popularities that drift from step to step).
Lengths vary from step to step. With experts in fp8 it is drawn which experts each token chooses,
and the kernel, which only a GPU has, is known by the shape of its result.
"""

import argparse
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gpu_alloc import TraceEvent, save_trace
from gpu_alloc.torch import ShapesOnly, TraceRecorder
from moe_pipeline.experts import fp8
from moe_pipeline.experts.order import ExpertOrder
from moe_pipeline.router import top_k
from moe_train.model import DecoderConfig, DecoderStage, StageOptions
from moe_train.model.stage import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A decoder, by transformers' keys, and how it is trained."""

    model: Mapping[str, Any]
    layers: int
    batch: int
    length: int
    recompute: bool = False
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False


_COMMON = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "moe_intermediate_size": 704,
    "num_experts_per_tok": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "norm_topk_prob": True,
}
_QWEN3 = _COMMON | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
}
_MIXTRAL = _COMMON | {
    "model_type": "mixtral",
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "intermediate_size": 1792,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
}

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "qwen3": Recipe(model=_QWEN3, layers=6, batch=4, length=1024),
        "qwen3, recompute": Recipe(model=_QWEN3, layers=8, batch=8, length=1024, recompute=True),
        "qwen3, fp32": Recipe(model=_QWEN3, layers=4, batch=4, length=768, dtype=torch.float32),
        "qwen3, many experts": Recipe(
            model=_QWEN3 | {"num_experts": 64, "moe_intermediate_size": 256},
            layers=4,
            batch=4,
            length=1024,
        ),
        "qwen3, fp8": Recipe(model=_QWEN3, layers=6, batch=4, length=1024, fp8=True),
        "mixtral, fp8": Recipe(model=_MIXTRAL, layers=5, batch=4, length=1024, fp8=True),
        "mixtral": Recipe(model=_MIXTRAL, layers=6, batch=4, length=1024),
        "mixtral, recompute": Recipe(
            model=_MIXTRAL, layers=8, batch=8, length=1536, recompute=True
        ),
    }
)


def decoder_trace(recipe: Recipe, *, seed: int, steps: int) -> list[TraceEvent]:
    """The allocations of `steps` steps of training, with a mark before each."""
    rng = random.Random(seed)
    model = DecoderConfig.from_dict({**recipe.model, "num_hidden_layers": recipe.layers})
    options = StageOptions(
        layers=range(recipe.layers),
        first=True,
        last=True,
        recompute="layers" if recipe.recompute else None,
        dtype=recipe.dtype,
        experts_fp8=recipe.fp8,
    )
    drawn = _choices_drawn(rng) if recipe.fp8 else _numbers_drawn(rng)
    shapes = ShapesOnly() if recipe.fp8 else FakeTensorMode()
    with drawn, shapes, TraceRecorder() as recorder:
        with recorder.phase("build"):
            stage = DecoderStage(model, options)
            optimizer = torch.optim.AdamW(stage.parameters(), foreach=False)
        for step in range(steps):
            length = int(recipe.length * rng.uniform(0.5, 1.0))
            with recorder.phase(f"step {step}"):
                _train(stage, optimizer, recipe.batch, length)
    return recorder.events


def _train(stage: DecoderStage, optimizer: torch.optim.Optimizer, batch: int, length: int) -> None:
    tokens = torch.randint(0, stage.config.vocab_size, (batch, length + 1))
    positions = torch.arange(length).expand(batch, length)
    target = Target(tokens[:, 1:], 1 / (batch * length))
    loss = stage(tokens[:, :-1], positions, target=target).loss
    loss.backward()
    del loss, target
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def _choices_drawn(rng: random.Random) -> Iterator[None]:
    """Which experts tokens choose is drawn, for code that looks at each; fp8 without CUDA."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def choose(scores_TE: torch.Tensor, config: Any) -> torch.Tensor:
        tokens, experts = scores_TE.shape
        popularity = torch.tensor(
            [rng.paretovariate(1.5) for _ in range(experts)], dtype=torch.float64
        )
        count = config.num_experts_per_tok
        return torch.multinomial(popularity.expand(tokens, -1), count, generator=generator)

    before = top_k.choose_experts, fp8.fp8_obstacle
    top_k.choose_experts, fp8.fp8_obstacle = choose, lambda weights: None  # type: ignore[assignment]
    try:
        yield
    finally:
        top_k.choose_experts, fp8.fp8_obstacle = before


@contextmanager
def _numbers_drawn(rng: random.Random) -> Iterator[None]:
    """While fake tensors run: what a program reads of their values is drawn from `rng`."""
    counts: dict[tuple[int, int], tuple[int, ...]] = {}

    def order(cls: type[ExpertOrder], topk_idx_TK: torch.Tensor, *, num_experts: int) -> Any:
        flat = topk_idx_TK.reshape(-1)
        sorted_R = torch.argsort(flat, stable=True)
        torch.bincount(flat.clamp(min=-2) + 2, minlength=num_experts + 2)
        rows = flat.numel()
        # Recomputation asks again for the same choices.
        key = (topk_idx_TK.untyped_storage()._cdata, rows)
        if key not in counts:
            shares = [rng.paretovariate(1.5) for _ in range(num_experts)]
            scale = rows / sum(shares)
            drawn = [int(share * scale) for share in shares]
            drawn[rng.randrange(num_experts)] += rows - sum(drawn)
            counts[key] = tuple(drawn)
        return cls(sorted_R[0:], counts[key])

    def scalar(mode: Any, func: Any, value: torch.Tensor) -> Any:
        return False if value.dtype == torch.bool else 0

    def bincount(mode: Any, func: Any, x: Any, weights: Any = None, minlength: int = 0) -> Any:
        with mode:
            return torch.empty(minlength, dtype=torch.int64)

    def tolist(tensor: FakeTensor) -> Any:
        return [False] * tensor.numel()

    aten = torch.ops.aten
    patched = fake_impls.op_implementations_dict
    before = patched[aten._local_scalar_dense.default], patched[aten.bincount.default]
    old_order, old_tolist = ExpertOrder.__dict__["of"], FakeTensor.__dict__.get("tolist")
    patched[aten._local_scalar_dense.default] = scalar
    patched[aten.bincount.default] = bincount
    ExpertOrder.of = classmethod(order)  # type: ignore[method-assign,assignment]
    FakeTensor.tolist = tolist  # type: ignore[method-assign]
    try:
        yield
    finally:
        patched[aten._local_scalar_dense.default], patched[aten.bincount.default] = before
        ExpertOrder.of = old_order
        if old_tolist is None:
            del FakeTensor.tolist
        else:
            FakeTensor.tolist = old_tolist  # type: ignore[method-assign]


def main() -> None:
    """Record one trace into a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.recipe]
    save_trace(decoder_trace(recipe, seed=arguments.seed, steps=arguments.steps), arguments.path)


if __name__ == "__main__":
    main()
