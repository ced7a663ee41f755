"""How torch comes to know the rules.

register_nccl_rules()
group = dist.new_group(backend="nccl_rules", pg_options=NcclRules(order="communicator"))
"""

from typing import Any

import torch.distributed as dist

from devicetest.nccl.collectives import METHODS
from devicetest.nccl.group import BACKEND_NAME, NcclRuleGroup
from devicetest.nccl.rules import NcclRules

_default = {"rules": NcclRules()}
for _name, _call in METHODS.items():
    setattr(NcclRuleGroup, _name, _call)


def register_nccl_rules(rules: NcclRules | None = None) -> None:
    """Make "nccl_rules" known to torch; groups without `pg_options` get these rules."""
    _default["rules"] = rules or NcclRules()
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND_NAME, _create, extended_api=True, devices=["cpu", "cuda"]
        )


def _create(options: Any, rules: Any) -> NcclRuleGroup:
    return NcclRuleGroup(options, rules if isinstance(rules, NcclRules) else _default["rules"])
