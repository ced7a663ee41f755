"""Optimizers of all kinds, saved and loaded into fresh ones: equal, or refused at save by name."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from unified_ckpt import load, save

Make = Callable[[list[Any]], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """One of a user's own, with a value among its states and a tensor in its group."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "calls": torch.zeros(())})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("count", 0)
                state["count"] += 1
                moment = state.setdefault("exp_avg", torch.zeros_like(p))
                moment.lerp_(p.grad, 0.1)
                p.data.add_(moment.sign(), alpha=-group["lr"])


class Windowed(torch.optim.Optimizer):
    """One whose states are lists, tuples and dicts of tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["window"] = [*state.get("window", []), p.grad.clone()][-2:]
            state["sums"] = {"rows": (p.detach().sum(0), None), 3: torch.ones(2)}
            p.data.sub_(sum(state["window"]), alpha=0.1)


class Paired(torch.optim.Optimizer):
    """One whose states are tensors made of others."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            zeros = torch.zeros_like(p, requires_grad=False)
            pair = self.state[p].setdefault("exp_avg", TwoTensor(zeros, zeros.clone()))
            pair.a.add_(p.grad)
            pair.b.lerp_(p.grad, 0.5)
            p.data.sub_(pair.a + pair.b, alpha=0.1)


OPTIMIZERS: dict[str, Make] = {
    "paired": Paired,
    "adagrad, decay": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "nadam, decoupled": lambda p: torch.optim.NAdam(p, lr=0.1, decoupled_weight_decay=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw, rate a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "adamw, maximize": lambda p: torch.optim.AdamW(p, lr=0.1, maximize=True, foreach=False),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3),
    "lbfgs, line search": lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe"),
    "muon": lambda p: torch.optim.Muon([(n, q) for n, q in p if q.dim() == 2], lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "rmsprop, centered": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd, nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "lion": Lion,
    "windowed": Windowed,
}


def ao(name: str, **options: Any) -> Make:
    def make(params: list[Any]) -> torch.optim.Optimizer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optim = pytest.importorskip("torchao.optim", reason="needs the group peers")
        return getattr(optim, name)([q for _, q in params], **options)

    return make


OPTIMIZERS |= {
    "torchao 8 bit": ao("AdamW8bit", lr=0.1),
    "torchao 4 bit": ao("AdamW4bit", lr=0.1),
    "torchao fp8": ao("AdamWFp8", lr=0.1),
}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Embedding(8, 64))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model[1](model[0](torch.ones(2, 64))).square().mean() + model[2].weight.sin().sum()
        value.backward()
        return value

    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps
        for _ in range(count):
            loss()
            optimizer.step(loss) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()


def same(a: object, b: object) -> bool:
    """Whether two states are equal, types included, through every collection."""
    if isinstance(a, torch.Tensor):
        if hasattr(a, "__tensor_flatten__"):
            names, context = a.__tensor_flatten__()
            inner = [same(getattr(a, name), getattr(b, name)) for name in names]
            return type(a) is type(b) and context == b.__tensor_flatten__()[1] and all(inner)
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_of_any_kind_goes_on_as_if_it_had_not_been_saved(
    kind: str, tmp_path: Path
) -> None:
    model, again = network(1), network(2)
    optimizer = OPTIMIZERS[kind](list(model.named_parameters()))
    steps(model, optimizer, 3)
    save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    back = OPTIMIZERS[kind](list(again.named_parameters()))
    assert load({"model": again, "optimizer": back}, checkpoint_id=tmp_path / "c").missing == ()
    expected, found = optimizer.state_dict(), back.state_dict()
    for number, state in expected["state"].items():
        assert {*found["state"][number]} == {*state}
        for name, value in state.items():
            assert same(found["state"][number][name], value), name
    for mine, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert all(same(mine[name], theirs[name]) for name in theirs)
    for each, one in ((model, optimizer), (again, back)):
        torch.manual_seed(3)  # stochastic rounding
        steps(each, one, 2)
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
