"""Checkpoints in the memory or on the disks of the nodes themselves, with copies on other nodes.

The ranks of a node save what they hold into a folder of that node; then each node sends its copy
to the next ones of a ring, over gloo. A copy is a checkpoint like any other, with manifest and
checksums, and belongs to one save by its token: copies of one token that together are of all ranks
are a state, whichever nodes they lie on. The copies before go only when the new ones are complete,
so at any moment one state is whole. What a lost node costs follows from this plan alone.

May import: saving, state, plans, files, geometry.
"""

from unified_ckpt.tiers.copies import NodeCopy as NodeCopy
from unified_ckpt.tiers.copies import held_copies as held_copies
from unified_ckpt.tiers.node_tier import NodeTier as NodeTier
from unified_ckpt.tiers.node_tier import TierReport as TierReport
from unified_ckpt.tiers.options import TierOptions as TierOptions
from unified_ckpt.tiers.plan import CopyPlan as CopyPlan
from unified_ckpt.tiers.recovery import RecoveryGoal as RecoveryGoal
from unified_ckpt.tiers.recovery import describe_recovery as describe_recovery
from unified_ckpt.tiers.recovery import recovery_goals as recovery_goals
