"""The room `signature`."""

from comm_collectives.call.signature.callsite import CallSite as CallSite
from comm_collectives.call.signature.callsite import call_site as call_site
from comm_collectives.call.signature.callsite import current_site as current_site
from comm_collectives.call.signature.callsite import use_site as use_site
from comm_collectives.call.signature.frames import BACKWARD as BACKWARD
from comm_collectives.call.signature.frames import HEAD_BYTES as HEAD_BYTES
from comm_collectives.call.signature.frames import PART_BYTES as PART_BYTES
from comm_collectives.call.signature.frames import REFUSED as REFUSED
from comm_collectives.call.signature.frames import REFUSED_TYPE as REFUSED_TYPE
from comm_collectives.call.signature.frames import TRAVELS_APART as TRAVELS_APART
from comm_collectives.call.signature.frames import WANTS_GRAD as WANTS_GRAD
from comm_collectives.call.signature.frames import WANTS_SHEETS as WANTS_SHEETS
from comm_collectives.call.signature.frames import Argument as Argument
from comm_collectives.call.signature.frames import Head as Head
from comm_collectives.call.signature.frames import Words as Words
from comm_collectives.call.signature.frames import dtype_argument as dtype_argument
from comm_collectives.call.signature.frames import operation_name as operation_name
from comm_collectives.call.signature.frames import shape_argument as shape_argument
from comm_collectives.call.signature.frames import status_of as status_of
