"""Every deliberate mistake of the matrix, by its name.

MISUSE_OF["op differs"].run(at)
"""

from comm_collectives.checking.misuse.absences import ABSENCES, OTHERS
from comm_collectives.checking.misuse.disagreements import DISAGREEMENTS
from comm_collectives.checking.misuse.moe import MOE_MISUSES
from comm_collectives.checking.misuse.outcome import Misuse
from comm_collectives.checking.misuse.raw import RAW_ONLY
from comm_collectives.checking.misuse.refusals import REFUSALS
from comm_collectives.checking.misuse.torch_order import TORCH_ORDER_MISUSES

MISUSES: tuple[Misuse, ...] = (
    *DISAGREEMENTS,
    *REFUSALS,
    *TORCH_ORDER_MISUSES,
    *MOE_MISUSES,
    *OTHERS,
    *ABSENCES,
)
MISUSE_OF = {misuse.name: misuse for misuse in (*MISUSES, *RAW_ONLY)}
