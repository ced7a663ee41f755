"""How torch comes to know the rules.

register_nccl_rules()
group = dist.new_group(backend="nccl_rules", pg_options=NcclRules(order="communicator"))
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from devicetest.nccl.collectives import METHODS
from devicetest.nccl.group import BACKEND_NAME, NcclRuleGroup
from devicetest.nccl.rules import NcclRules

_default = {"rules": NcclRules()}


def _method(name: str) -> Callable[..., Any]:
    """Return the group's method of that name: gloo's for tensors of the host, if it has gloo."""

    def call(group: NcclRuleGroup, *args: Any, **options: Any) -> Any:
        # A barrier is NCCL's wherever the group has it.
        if name != "barrier" and group.is_for_host(args):
            return getattr(group.host, name)(*args, **options)

        def run() -> Any:
            group.note_options((*args, *options.values()))
            return METHODS[name](group, *args, **options)

        if group.rules.machine is not None:
            group.rules.machine.keep(lambda: run().wait())
        return run()

    return call


for _name in METHODS:
    setattr(NcclRuleGroup, _name, _method(_name))


def has_nccl_rules() -> bool:
    """Whether this torch takes process groups that are written in Python: 2.11 does not."""
    try:
        Backend(0, 1)
    except TypeError:
        return False
    return True


def register_nccl_rules(rules: NcclRules | None = None) -> None:
    """Make "nccl_rules" known to torch; groups without `pg_options` get these rules."""
    _default["rules"] = rules or NcclRules()
    _register()


def _register() -> None:
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND_NAME, _create, extended_api=True, devices=["cpu", "cuda"]
        )


def _create(options: Any, rules: Any) -> NcclRuleGroup:
    return NcclRuleGroup(options, rules if isinstance(rules, NcclRules) else _default["rules"])


@contextmanager
def in_place_of_nccl(**rules: Any) -> Iterator[None]:
    """Give groups made inside whose backend is, or has, NCCL these rules, under NCCL's name."""
    _register()  # under its own name it keeps the rules that were given
    plain = c10d._new_process_group_helper

    def helper(size: int, rank: int, ranks: Any, backend: Any, *rest: Any, **given: Any) -> Any:
        if "nccl" not in str(backend) or BACKEND_NAME in str(backend):
            return plain(size, rank, ranks, backend, *rest, **given)
        device, config = given.get("device_id"), c10d.BackendConfig(backend)
        order = "pair" if device is None else "communicator"
        host = config.get_device_backend_map().get("cpu") == "gloo"
        ours: dict[str, Any] = {"order": order, "any_device": False, "host": host} | rules
        given |= {"backend_options": NcclRules(**ours), "device_id": None}
        group, prefix_store = plain(size, rank, ranks, BACKEND_NAME, *rest, **given)
        if isinstance(group, NcclRuleGroup):
            group.bound_device_id = device
            if group.host is not None:  # as torch tells all backends of a group
                group.host._set_group_uid(group.group_name)
            names: dict[Any, Any] = c10d._world.pg_map
            names[group] = (str(backend), prefix_store)
            c10d._world.pg_backend_config[group] = str(config)
        return group, prefix_store

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(c10d, "_new_process_group_helper", helper))
        for owner in (dist, c10d, device_mesh):
            stack.enter_context(mock.patch.object(owner, "split_group", _split_group))
        yield


def _split_group(
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] = (),
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """As torch's, without splitting: groups made anew have communicators of their own too."""
    world = dist.get_process_group_ranks(parent_pg or dist.group.WORLD)
    made: dict[int, Any] = {}
    for ranks in split_ranks:
        chosen = [world[rank] for rank in ranks]
        group = dist.new_group(chosen, timeout=timeout, backend=backend, group_desc=group_desc)
        made |= dict.fromkeys(chosen, group)
    return made.get(dist.get_rank())
