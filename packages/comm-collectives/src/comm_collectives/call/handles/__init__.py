"""Calls that run beside the program: a handle to wait on, a thread for each group.

May import: base, signature, devices, groups.
"""

from comm_collectives.call.handles.caught import Caught as Caught
from comm_collectives.call.handles.handles import CallLater as CallLater
from comm_collectives.call.handles.handles import CallNow as CallNow
from comm_collectives.call.handles.handles import Handle as Handle
from comm_collectives.call.handles.handles import deferred_graph as deferred_graph
from comm_collectives.call.handles.handles import launch as launch
from comm_collectives.call.handles.handles import launch_on as launch_on
from comm_collectives.call.handles.handles import put_in_graph as put_in_graph
from comm_collectives.call.handles.handles import turn as turn
from comm_collectives.call.handles.watch import debug_mode as debug_mode
from comm_collectives.call.handles.worker import Awaiting as Awaiting
from comm_collectives.call.handles.worker import Worker as Worker
