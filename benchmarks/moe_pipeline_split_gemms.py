"""Matrix products of a backward in two halves, over those of a whole backward.

Zero-bubble schedules run a backward as I (input gradients) and W (weight gradients). Counted here
are the matrix products of I and W together, by a dispatch mode, over those of `loss.backward()` of
the same stage: ours with a `WeightGradStore`, and torch's `stage_backward_input` and
`stage_backward_weight` as its schedules call them. A stage has 16 layers; of experts it is one MoE
layer with our autograd function, of grouped_mm one with torch's. Also printed is the largest
difference of gradients from the whole backward's. Deterministic: one run is enough.

    python benchmarks/moe_pipeline_split_gemms.py
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moe_pipeline.config import ExpertsOptions, MoEConfig
from moe_pipeline.layer import MoELayer
from moe_pipeline.recomputation import recompute_contexts
from moe_pipeline.weight_grad import (
    DeferredWeightGrad,
    WeightGradStore,
    defer,
    deferrable,
    split_backward,
)

LAYERS, WIDTH, TOKENS = 16, 32, 24
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm"}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count += func._schema.name.removeprefix("aten::") in PRODUCTS
        return func(*args, **(kwargs or {}))


class Product(torch.autograd.Function):
    """A user's function with a product of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, deferred: DeferredWeightGrad | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferred = deferred
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight.t() if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = defer(ctx.deferred, lambda x, grad: x.t() @ grad, x, grad)
        return grad_x, grad_weight, None


class Custom(nn.Module):
    """A linear layer by `Product`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Product.apply(x, *deferrable(self.weight))
        return out


class Stage(nn.Module):
    """Layers one after the other, recomputed each, all together, or not at all."""

    def __init__(self, layers: Sequence[nn.Module], region: str = "none") -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        if self.region == "stage":
            return self._again(self._all, x)
        for layer in self.layers:
            x = self._again(layer, x) if self.region == "layer" else _hidden(layer(x))
        return x

    def _all(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _hidden(layer(x))
        return x

    def _again(self, function: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        return _hidden(checkpoint(function, x, use_reentrant=False, context_fn=recompute_contexts))


def _hidden(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.hidden


def moe_layer(implementation: str) -> MoELayer:
    config = MoEConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        experts=ExpertsOptions(experts_implementation=implementation),
        initializer_range=0.2,
    )
    return MoELayer(config)


def linears() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]


STAGES: dict[str, Callable[[], Stage]] = {
    "linear": lambda: Stage(linears()),
    "experts": lambda: Stage([moe_layer("fused")]),
    "experts_grouped_mm": lambda: Stage([moe_layer("grouped_mm")]),
    "custom_function": lambda: Stage([Custom() for _ in range(LAYERS)]),
    "checkpointed_layers": lambda: Stage(linears(), "layer"),
    "checkpointed_stage": lambda: Stage(linears(), "stage"),
}


def whole(stage: Stage, x: Tensor, grad: Tensor) -> int:
    y = stage(x)
    with Products() as products:
        y.backward(grad)
    return products.count


def ours(stage: Stage, x: Tensor, grad: Tensor) -> int:
    store = WeightGradStore()
    with split_backward(store):
        y = stage(x)
    with Products() as products:
        with store.deferring():
            torch.autograd.backward(y, grad)
        store.run()
    return products.count


def torchs(stage: Stage, x: Tensor, grad: Tensor) -> int:
    y = stage(x) * 1  # it detaches the output in place, which a view refuses
    with Products() as products:
        _, groups = stage_backward_input([y], [grad], [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    return products.count


def gradients(stage: Stage) -> list[Tensor]:
    found = [p.grad for p in stage.parameters() if p.grad is not None]
    stage.zero_grad()
    return found


def measure(name: str) -> list[dict[str, object]]:
    torch.manual_seed(0)
    stage = STAGES[name]()
    x, grad = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    counts, found = [], []
    for way in (whole, ours, torchs):
        counts.append(way(stage, x.clone().requires_grad_(), grad))
        found.append(gradients(stage))
    pairs = zip(found[0], found[1], strict=True)
    off = max(float((a - b).abs().max()) for a, b in pairs)
    return [
        figure(f"split_gemms_{name}", counts[1] / counts[0], "x"),
        figure(f"split_gemms_{name}_torch", counts[2] / counts[0], "x"),
        figure(f"split_gemms_{name}_difference", off, "absolute"),
    ]


def figure(name: str, value: float, unit: str) -> dict[str, object]:
    return {"figure": name, "value": value, "low": value, "high": value, "unit": unit, "n": 1}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    worst = 0.0
    for name in parser.parse_args(argv).stages:
        for each in measure(name):
            print(json.dumps(each))
            if each["figure"] == f"split_gemms_{name}":
                worst = max(worst, float(str(each["value"])))
    print(json.dumps(figure("split_gemms_worst", worst, "x")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
