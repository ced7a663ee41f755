"""One autograd node for every collective, and how a rank joins a backward with zeros.

May import: base, call, control, groups, handles, signature.
"""

from comm_collectives.call.autograd.backward_node import Back as Back
from comm_collectives.call.autograd.backward_node import Gradients as Gradients
from comm_collectives.call.autograd.backward_node import attach as attach
from comm_collectives.call.autograd.backward_node import wants_grad as wants_grad
from comm_collectives.call.autograd.passes import tell_of_failure as tell_of_failure
