"""What a device has been given to do for a group: who holds it up, from the side of the host.

A device waits for its peers in silence, until torch's watchdog ends the process. Here each rank's
host tells the others what its device waits for, so that the one to blame is named before that.

May import: base, signature, agreement, frames, groups.
"""

from comm_collectives.call.devices.graphs import is_captured as is_captured
from comm_collectives.call.devices.graphs import refuse_captured as refuse_captured
from comm_collectives.call.devices.launches import Launches as Launches
from comm_collectives.call.devices.launches import Start as Start
from comm_collectives.call.devices.launches import launch_transfers as launch_transfers
from comm_collectives.call.devices.queues import has_one_queue as has_one_queue
from comm_collectives.call.devices.queues import refuse_in_one_queue as refuse_in_one_queue
