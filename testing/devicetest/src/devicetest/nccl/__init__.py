"""A process-group backend with NCCL's rules, for real processes without a GPU.

One order per communicator (and pair), sends that wait for their receive, what NCCL refuses; a
deadlock raises within seconds and names who waits for whom. May import: machine, tensors.

    register_nccl_rules(NcclRules(buffering="none"))
    group = dist.new_group(backend="nccl_rules")
"""

from devicetest.nccl.exchange import NcclRuleError as NcclRuleError
from devicetest.nccl.group import NcclRuleGroup as NcclRuleGroup
from devicetest.nccl.registration import has_nccl_rules as has_nccl_rules
from devicetest.nccl.registration import register_nccl_rules as register_nccl_rules
from devicetest.nccl.rules import NcclRules as NcclRules
