"""Do all ranks make the same call? Pure functions of their signatures, and what is owed.

May import: signature.
"""

from comm_collectives.call.agreement.agreement import FLAGS as FLAGS
from comm_collectives.call.agreement.agreement import AgreementPolicy as AgreementPolicy
from comm_collectives.call.agreement.agreement import Comparison as Comparison
from comm_collectives.call.agreement.agreement import compare as compare
from comm_collectives.call.agreement.agreement import mismatch_error as mismatch_error
from comm_collectives.call.agreement.agreement import refused_error as refused_error
from comm_collectives.call.agreement.history import History as History
from comm_collectives.call.agreement.pending import PendingBackwards as PendingBackwards
from comm_collectives.call.agreement.pending import Standing as Standing
from comm_collectives.call.agreement.pending import agreed_backward as agreed_backward
