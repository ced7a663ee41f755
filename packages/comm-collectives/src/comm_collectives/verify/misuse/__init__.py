"""The room `misuse`."""

from comm_collectives.verify.misuse.absences import ABSENCES as ABSENCES
from comm_collectives.verify.misuse.absences import OTHERS as OTHERS
from comm_collectives.verify.misuse.disagreements import DISAGREEMENTS as DISAGREEMENTS
from comm_collectives.verify.misuse.moe import MOE_MISUSES as MOE_MISUSES
from comm_collectives.verify.misuse.outcome import At as At
from comm_collectives.verify.misuse.outcome import Misuse as Misuse
from comm_collectives.verify.misuse.outcome import judge_misuse as judge_misuse
from comm_collectives.verify.misuse.outcome import judge_raw_misuse as judge_raw_misuse
from comm_collectives.verify.misuse.outcome import run_misuse as run_misuse
from comm_collectives.verify.misuse.outcome import run_raw_misuse as run_raw_misuse
from comm_collectives.verify.misuse.raw import RAW as RAW
from comm_collectives.verify.misuse.raw import RAW_ONLY as RAW_ONLY
from comm_collectives.verify.misuse.refusals import REFUSALS as REFUSALS
from comm_collectives.verify.misuse.torch_order import TORCH_ORDER_MISUSES as TORCH_ORDER_MISUSES
