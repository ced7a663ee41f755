"""The correctness matrix: collective x dtype x shape, each with an answer known beforehand.

May import: base, call, collectives, moe, nested, p2p, planning, results.
"""

from comm_collectives.checking.cells.cases import COLUMNS as COLUMNS
from comm_collectives.checking.cells.cases import TORCH_ORDER as TORCH_ORDER
from comm_collectives.checking.cells.cases import all_cases as all_cases
from comm_collectives.checking.cells.cases import canaries as canaries
from comm_collectives.checking.cells.cases import expected_verdict as expected_verdict
from comm_collectives.checking.cells.cases import torch_cases as torch_cases
from comm_collectives.checking.cells.moe_cells import MOE_COLLECTIVES as MOE_COLLECTIVES
from comm_collectives.checking.cells.moe_cells import as_group as as_group
from comm_collectives.checking.cells.moe_cells import run_moe as run_moe
from comm_collectives.checking.cells.ours import run_ours as run_ours
from comm_collectives.checking.cells.problems import Case as Case
from comm_collectives.checking.cells.torch_order import run_torch_order as run_torch_order
