"""Optimizer states and parameter groups under names that hold in every layout.

May import: state/naming.
"""

from unified_ckpt.state.optimizer.optimizer_state import MASTER_FIELD as MASTER_FIELD
from unified_ckpt.state.optimizer.optimizer_state import MASTER_NAMES as MASTER_NAMES
from unified_ckpt.state.optimizer.optimizer_state import MOMENTS as MOMENTS
from unified_ckpt.state.optimizer.optimizer_state import Entry as Entry
from unified_ckpt.state.optimizer.optimizer_state import group_names as group_names
from unified_ckpt.state.optimizer.optimizer_state import hyperparameters as hyperparameters
from unified_ckpt.state.optimizer.optimizer_state import is_optimizer_state as is_optimizer_state
from unified_ckpt.state.optimizer.optimizer_state import optimizer_entries as optimizer_entries
from unified_ckpt.state.optimizer.param_groups import PARAMS as PARAMS
from unified_ckpt.state.optimizer.param_groups import StoredGroups as StoredGroups
from unified_ckpt.state.optimizer.param_groups import merge_groups as merge_groups
