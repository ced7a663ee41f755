"""Every deliberate mistake of the matrix, by its name.

MISUSE_OF["op differs"].run(at)
"""

from comm_collectives.verify.misuse.absences import ABSENCES, OTHERS
from comm_collectives.verify.misuse.disagreements import DISAGREEMENTS
from comm_collectives.verify.misuse.moe import MOE_MISUSES
from comm_collectives.verify.misuse.outcome import Misuse
from comm_collectives.verify.misuse.raw import RAW_ONLY
from comm_collectives.verify.misuse.refusals import REFUSALS
from comm_collectives.verify.misuse.torch_order import TORCH_ORDER_MISUSES

MISUSES: tuple[Misuse, ...] = (
    *DISAGREEMENTS,
    *REFUSALS,
    *TORCH_ORDER_MISUSES,
    *MOE_MISUSES,
    *OTHERS,
    *ABSENCES,
)
MISUSE_OF = {misuse.name: misuse for misuse in (*MISUSES, *RAW_ONLY)}
