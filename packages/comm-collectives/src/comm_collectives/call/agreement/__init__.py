"""The room `agreement`."""

from comm_collectives.call.agreement.agreement import EARLIER as EARLIER
from comm_collectives.call.agreement.agreement import AgreementPolicy as AgreementPolicy
from comm_collectives.call.agreement.agreement import Verdict as Verdict
from comm_collectives.call.agreement.agreement import judge as judge
from comm_collectives.call.agreement.agreement import mismatch_error as mismatch_error
from comm_collectives.call.agreement.agreement import refused_error as refused_error
from comm_collectives.call.agreement.history import History as History
from comm_collectives.call.agreement.pending import PendingBackwards as PendingBackwards
