"""What came of a cell or a mistake on one rank, and on all ranks together.

May import: no other room.
"""

from comm_collectives.checking.results.results import SOON_S as SOON_S
from comm_collectives.checking.results.results import CaseResult as CaseResult
from comm_collectives.checking.results.results import Verdict as Verdict
from comm_collectives.checking.results.results import is_nameless as is_nameless
from comm_collectives.checking.results.results import judge as judge
from comm_collectives.checking.results.results import on_rank as on_rank
from comm_collectives.checking.results.results import run_case as run_case
