"""The face: what every public name promises, and what the README shows."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import comm_collectives
import comm_collectives as cc
from package_facts import (
    Wrong,
    check_import_is_cheap,
    check_name_table,
    check_names,
    check_tour,
    check_wrong_types,
    run_examples,
)
from ranktest import run_ranks

README = Path(__file__).parents[1] / "README.md"


def test_every_public_name_resolves_and_is_documented() -> None:
    check_names(comm_collectives)


def test_importing_the_package_imports_nothing_heavy() -> None:
    check_import_is_cheap(comm_collectives, "torch", "numpy", "tokenizers", "rich", "matplotlib")


def test_the_examples_of_the_readme_run() -> None:
    assert run_examples(README) > 0


def test_the_readme_has_a_line_for_each_room_and_each_public_name() -> None:
    check_tour(comm_collectives, README)
    check_name_table(comm_collectives, README)


def test_wrong_types_are_errors_of_this_package_with_a_group_and_without() -> None:
    def fn(rank: int, world_size: int) -> int:
        # A Handle is made by the calls; the three errors are not called either.
        return check_wrong_types(
            comm_collectives,
            comm_collectives.CommError,
            given={"AgreementPolicy": {"every": Wrong()}, "MoeOptions": {"route": Wrong()}},
            not_called=["Handle"],
        )

    assert run_ranks(fn, 1) == [len(comm_collectives.__all__) - 4]
    assert fn(0, 1) == len(comm_collectives.__all__) - 4


def test_every_public_function_that_needs_other_ranks_breaks_a_compiled_graph() -> None:
    for name in comm_collectives.__all__:
        value = getattr(comm_collectives, name)
        if inspect.isfunction(value) and name != "call_site":
            assert getattr(value, "_torchdynamo_disable", False), name
    assert "torch._dynamo" not in inspect.getsource(comm_collectives._torch_private)


def _layer(x: torch.Tensor) -> torch.Tensor:
    choices = torch.arange(4).view(4, 1) % 2
    sent = cc.dispatch(x * 2, choices, torch.ones(4, 1), num_experts=2, group=dist.group.WORLD)
    return cc.combine(sent.x * 2, sent.handle) + 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
def test_compiled_functions_call_collectives_with_gradients() -> None:
    import torch._dynamo  # once here, not in every forked rank; and not where tests are collected

    functions: dict[Callable[[torch.Tensor], Any], tuple[float, float]] = {
        lambda x: cc.all_reduce(x * 2) + 1: (5, 4),
        lambda x: cc.all_to_all(x * 2) + 1: (3, 2),
        lambda x: cc.all_reduce(x * 2, async_op=True).wait() + 1: (5, 4),
        lambda x: cc.broadcast_nested({"a": [x.detach()]}, src=0)["a"][0] + x * 2: (3, 2),  # type: ignore[index]
        _layer: (5, 4),
    }

    def fn(rank: int, world_size: int) -> None:
        for function, (value, slope) in functions.items():
            graphs = []

            def backend(graph: Any, _: object, graphs: list[Any] = graphs) -> Any:
                graphs.append(graph)
                return graph

            compiled = torch.compile(function, backend=backend)
            for _ in range(2):
                x = torch.ones(4, 2, requires_grad=True)
                y = compiled(x)
                y.sum().backward()
                assert y.tolist() == [[value] * 2] * 4
                assert x.grad is not None
                assert x.grad.tolist() == [[slope] * 2] * 4
            assert 1 <= len(graphs) <= 3  # around the calls, and none of what they run

    run_ranks(fn, 2, timeout_s=120)
