"""The room `cells`."""

from comm_collectives.verify.cells.cases import ABORTED as ABORTED
from comm_collectives.verify.cells.cases import COLUMNS as COLUMNS
from comm_collectives.verify.cells.cases import FAILED as FAILED
from comm_collectives.verify.cells.cases import REFUSED as REFUSED
from comm_collectives.verify.cells.cases import RIGHT as RIGHT
from comm_collectives.verify.cells.cases import SOON_S as SOON_S
from comm_collectives.verify.cells.cases import TIMED_OUT as TIMED_OUT
from comm_collectives.verify.cells.cases import TORCH_ORDER as TORCH_ORDER
from comm_collectives.verify.cells.cases import VERDICTS as VERDICTS
from comm_collectives.verify.cells.cases import WRONG as WRONG
from comm_collectives.verify.cells.cases import CaseResult as CaseResult
from comm_collectives.verify.cells.cases import all_cases as all_cases
from comm_collectives.verify.cells.cases import canaries as canaries
from comm_collectives.verify.cells.cases import expected_verdict as expected_verdict
from comm_collectives.verify.cells.cases import is_nameless as is_nameless
from comm_collectives.verify.cells.cases import judge as judge
from comm_collectives.verify.cells.cases import on_rank as on_rank
from comm_collectives.verify.cells.cases import run_case as run_case
from comm_collectives.verify.cells.cases import torch_cases as torch_cases
from comm_collectives.verify.cells.moe_cells import MOE_COLLECTIVES as MOE_COLLECTIVES
from comm_collectives.verify.cells.moe_cells import as_group as as_group
from comm_collectives.verify.cells.moe_cells import run_moe as run_moe
from comm_collectives.verify.cells.ours import run_ours as run_ours
from comm_collectives.verify.cells.problems import Case as Case
from comm_collectives.verify.cells.torch_order import run_torch_order as run_torch_order
