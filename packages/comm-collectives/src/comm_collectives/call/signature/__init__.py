"""What one rank tells all others of its call: operation, arguments, place in the program.

May import: base.
"""

from comm_collectives.call.signature.call_signature import Argument as Argument
from comm_collectives.call.signature.call_signature import CallSignature as CallSignature
from comm_collectives.call.signature.call_signature import SignatureWords as SignatureWords
from comm_collectives.call.signature.call_signature import Status as Status
from comm_collectives.call.signature.callsite import CallSite as CallSite
from comm_collectives.call.signature.callsite import call_site as call_site
from comm_collectives.call.signature.callsite import current_site as current_site
from comm_collectives.call.signature.callsite import site_in_torch as site_in_torch
from comm_collectives.call.signature.callsite import use_site as use_site
