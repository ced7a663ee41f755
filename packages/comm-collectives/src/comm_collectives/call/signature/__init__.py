"""The room `signature`."""

from comm_collectives.call.signature.callsite import CallSite as CallSite
from comm_collectives.call.signature.callsite import call_site as call_site
from comm_collectives.call.signature.callsite import current_site as current_site
from comm_collectives.call.signature.callsite import use_site as use_site
from comm_collectives.call.signature.call_signature import BACKWARD as BACKWARD
from comm_collectives.call.signature.call_signature import HEAD_BYTES as HEAD_BYTES
from comm_collectives.call.signature.call_signature import PART_BYTES as PART_BYTES
from comm_collectives.call.signature.call_signature import REFUSED as REFUSED
from comm_collectives.call.signature.call_signature import REFUSED_TYPE as REFUSED_TYPE
from comm_collectives.call.signature.call_signature import TRAVELS_APART as TRAVELS_APART
from comm_collectives.call.signature.call_signature import WANTS_GRAD as WANTS_GRAD
from comm_collectives.call.signature.call_signature import WANTS_SHEETS as WANTS_SHEETS
from comm_collectives.call.signature.call_signature import Argument as Argument
from comm_collectives.call.signature.call_signature import Head as Head
from comm_collectives.call.signature.call_signature import Words as Words
from comm_collectives.call.signature.call_signature import dtype_argument as dtype_argument
from comm_collectives.call.signature.call_signature import operation_name as operation_name
from comm_collectives.call.signature.call_signature import shape_argument as shape_argument
from comm_collectives.call.signature.call_signature import status_of as status_of
