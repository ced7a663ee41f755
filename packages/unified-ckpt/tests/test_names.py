"""A state that is loaded under other names than it was saved: equal, or refused with both lists."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ranktest import run_ranks
from unified_ckpt import load, read_index, save
from unified_ckpt.errors import LoadError
from unified_ckpt.options import LoadOptions

Wrap = Callable[[nn.Module], nn.Module]


class Wrapper(nn.Module):
    """A user's own, which holds a module by the name that DDP has for it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def each_layer(wrap: Wrap) -> Wrap:
    def wrapped(module: nn.Module) -> nn.Module:
        for name, child in list(module.named_children()):
            setattr(module, name, wrap(child))
        return module

    return wrapped


def fsdp(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


WRAPPERS: dict[str, Wrap] = {
    "nothing": lambda m: m,
    "ddp": DistributedDataParallel,
    "ddp of each layer": each_layer(DistributedDataParallel),
    "data parallel": nn.DataParallel,
    "compile": compiled,
    "compile of each layer": each_layer(compiled),
    "checkpointing": checkpoint_wrapper,
    "checkpointing of each layer": each_layer(checkpoint_wrapper),
    "fsdp": fsdp,
    "compile of ddp": lambda m: compiled(DistributedDataParallel(m)),
    "ddp of compile": lambda m: DistributedDataParallel(compiled(m)),
    "a user's own": Wrapper,
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def trained(model: nn.Module, *, named: bool) -> torch.optim.Optimizer:
    params: Any = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    with torch.compiler.set_stance("force_eager"):
        model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    return optimizer


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    return [optimizer.state[p]["exp_avg"].flatten().tolist() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:.*NO_SHARD:UserWarning", "ignore::FutureWarning")
def test_states_move_between_any_two_of_twelve_wrappers(tmp_path: Path) -> None:
    """With names and without, through both, by the optimizer alone and with its module."""

    def fn(rank: int, world_size: int) -> None:
        saved = {}
        for number, wrap in enumerate(WRAPPERS.values()):
            model = wrap(network())
            optimizer = trained(model, named=number % 2 == 0)
            state = {"model": model, "optimizer": optimizer}
            save(state, checkpoint_id=tmp_path / f"c{number}")
            alone = {"optimizer": trained(model, named=True)}
            save(alone, checkpoint_id=tmp_path / f"o{number}")
            saved[number] = (
                moments(model, optimizer),
                moments(model, alone["optimizer"]),
                [p.flatten().tolist() for p in model.parameters()],
            )
        for a, (name, wrap) in enumerate(WRAPPERS.items()):
            for b in (a, (a + 1) % 12, (a + 5) % 12):
                back = wrap(network())
                fresh = torch.optim.AdamW(back.named_parameters() if b % 2 else back.parameters())
                load({"model": back, "optimizer": fresh}, checkpoint_id=tmp_path / f"c{b}")
                assert moments(back, fresh) == saved[b][0], (name, b)
                named = torch.optim.AdamW(back.named_parameters())
                load({"optimizer": named}, checkpoint_id=tmp_path / f"o{b}")
                assert moments(back, named) == saved[b][1], (name, b)

    run_ranks(fn, 1)
    for number, name in enumerate(WRAPPERS):
        prefix = "module." if name == "a user's own" else ""
        keys = {f"{prefix}{key}" for key in network().state_dict()}
        assert set(read_index(tmp_path / f"c{number}")) == keys, name
        stored = read_index(tmp_path / f"c{number}", "optimizer")
        assert {key.partition("/")[0] for key in stored} == keys, name


class Two(nn.Module):
    def __init__(self, first: str) -> None:
        super().__init__()
        setattr(self, first, nn.Linear(2, 2))
        self.last = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(next(self.children())(x))


def stepped(model: nn.Module, *unused: str) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = None if name in unused else torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_a_renamed_layer_raises_with_both_lists_and_changes_nothing(tmp_path: Path) -> None:
    save({"optimizer": stepped(Two("old"))}, checkpoint_id=tmp_path / "c")
    model = Two("new")
    back = torch.optim.AdamW(model.named_parameters())
    message = r"no state is stored of 'new.weight', 'new.bias'; .* of 'old.bias', 'old.weight'"
    with pytest.raises(LoadError, match=message):
        load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    assert not back.state
    report = load({"optimizer": back}, checkpoint_id=tmp_path / "c", strict=False)
    assert report.missing == ("new.weight", "new.bias") and len(back.state) == 2
    other = torch.optim.AdamW(model.named_parameters())
    options = LoadOptions(ignored_keys=("^old", "^new"))
    load({"optimizer": other}, checkpoint_id=tmp_path / "c", options=options)
    assert len(other.state) == 2


def test_all_names_of_another_kind_raise(tmp_path: Path) -> None:
    save({"optimizer": stepped(Two("old"))}, checkpoint_id=tmp_path / "c")
    named = [(f"p{i}", p) for i, p in enumerate(Two("old").parameters())]
    with pytest.raises(LoadError, match=r"no state is stored of 'p0', 'p1', 'p2', 'p3'; nothing"):
        load({"optimizer": torch.optim.AdamW(named)}, checkpoint_id=tmp_path / "c")


def test_states_that_nobody_takes_raise_where_nobody_else_could(tmp_path: Path) -> None:
    model = Two("old")
    save({"optimizer": stepped(model)}, checkpoint_id=tmp_path / "c")

    def part(*names: str) -> torch.optim.Optimizer:
        return torch.optim.AdamW([(n, p) for n, p in Two("old").named_parameters() if n in names])

    with pytest.raises(LoadError, match=r"of none; nothing takes .* 'old.bias', 'old.weight'"):
        load({"optimizer": part("last.weight", "last.bias")}, checkpoint_id=tmp_path / "c")

    def fn(rank: int, world_size: int) -> None:  # pipeline stages: the other's are the other's
        names = [("old.weight", "old.bias"), ("last.weight", "last.bias")][rank]
        optimizer = part(*names)
        load({"optimizer": optimizer}, checkpoint_id=tmp_path / "c")
        assert len(optimizer.state) == 2

    run_ranks(fn, 2)


def test_parameters_that_had_no_state_need_none(tmp_path: Path) -> None:
    model = Two("old")
    save({"optimizer": stepped(model, "old.bias")}, checkpoint_id=tmp_path / "c")
    back = torch.optim.AdamW(Two("old").named_parameters())
    load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    assert len(back.state) == 3
    save({"optimizer": torch.optim.AdamW(model.named_parameters())}, checkpoint_id=tmp_path / "d")
    again = torch.optim.AdamW(Two("new").named_parameters())
    load({"optimizer": again}, checkpoint_id=tmp_path / "d")  # it was saved before its first step
    assert not again.state


def test_two_names_that_differ_by_wrappers_only_are_not_mixed_up(tmp_path: Path) -> None:
    state = {"model": {"module.w": torch.ones(1), "w": torch.zeros(1)}}
    save(state, checkpoint_id=tmp_path / "c")
    back = {"model": {"module.w": torch.full((1,), 5.0), "w": torch.full((1,), 5.0)}}
    load(back, checkpoint_id=tmp_path / "c")
    assert (back["model"]["module.w"], back["model"]["w"]) == (1, 0)
    with pytest.raises(LoadError, match=r"lacks '_orig_mod.w'"):
        load({"model": {"_orig_mod.w": torch.zeros(1)}}, checkpoint_id=tmp_path / "c")


def test_a_state_dict_of_numbers_has_the_names_of_the_only_module(tmp_path: Path) -> None:
    model = network()
    optimizer = trained(model, named=False)
    state = {"optimizer": optimizer.state_dict(), "model": model}
    save(state, checkpoint_id=tmp_path / "c")
    again = network()
    back = torch.optim.AdamW(again.parameters())
    load({"model": again, "optimizer": back}, checkpoint_id=tmp_path / "c")
    assert moments(again, back) == moments(model, optimizer)
    with pytest.raises(ValueError, match="put the module into the same state dict"):
        save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "d")
    groups = [{"params": [p]} for p in model.parameters()]
    two = copy.deepcopy(torch.optim.AdamW(groups).state_dict())
    with pytest.raises(ValueError, match="numbers its parameters"):  # in whose order?
        save({"model": model, "optimizer": two}, checkpoint_id=tmp_path / "d")
    turned = torch.optim.SGD([*reversed(list(model.parameters()))], lr=0.1, momentum=0.9)
    turned.step()
    with pytest.raises(ValueError, match=r"parameter 0 has states of shape \(2,\), but '0.weight'"):
        save({"model": model, "optimizer": turned.state_dict()}, checkpoint_id=tmp_path / "d")


def test_what_keeps_more_than_states_and_groups_is_refused(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = network()
        wraps = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        model(torch.ones(1, 3)).sum().backward()
        wraps.step()
        with pytest.raises(ValueError, match="ZeroRedundancyOptimizer keeps more in its own"):
            save({"model": model, "optimizer": wraps}, checkpoint_id=tmp_path / "c")
        dist.barrier()

    run_ranks(fn, 1)


def test_a_native_load_reads_the_optimizer_that_dcps_writer_wrote(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    from unified_ckpt.dcp import UnifiedStorageWriter

    model = Two("first")
    decay = [{"params": [*model.last.parameters()], "weight_decay": 0.3, "lr": 0.2}]
    optimizer = torch.optim.AdamW([{"params": [*model.first.parameters()]}, *decay])
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        given = get_optimizer_state_dict(model, optimizer, options=options)
        target = tmp_path / f"c{flat}"
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.save(
                {"model": model.state_dict(), "optimizer": given},
                storage_writer=UnifiedStorageWriter(target),
            )
        again = Two("first")
        back = torch.optim.AdamW(
            [{"params": [*again.last.parameters()]}, {"params": [*again.first.parameters()]}]
        )
        load({"model": again, "optimizer": back}, checkpoint_id=target)
        for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert back.state[mine].keys() == optimizer.state[theirs].keys()
            for name, value in optimizer.state[theirs].items():
                assert torch.equal(back.state[mine][name], value), name
        assert [g["weight_decay"] for g in back.param_groups] == [0.3, 0.01]
        assert [g["lr"] for g in back.param_groups] == [0.2, 0.001]
        other = Two("second")
        with pytest.raises(LoadError, match=r"of 'second.weight', .* of 'first.bias', 'first"):
            load({"optimizer": torch.optim.AdamW(other.named_parameters())}, checkpoint_id=target)
