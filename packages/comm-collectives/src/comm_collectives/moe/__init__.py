"""Mixture of experts: bring rows to the ranks of their experts, and the results back.

May import: base, call, collectives, planning.
"""

from comm_collectives.moe.dispatch_combine import Dispatched as Dispatched
from comm_collectives.moe.dispatch_combine import combine as combine
from comm_collectives.moe.dispatch_combine import combine_async as combine_async
from comm_collectives.moe.dispatch_combine import dispatch as dispatch
from comm_collectives.moe.dispatch_combine import dispatch_async as dispatch_async
from comm_collectives.moe.handle import DispatchHandle as DispatchHandle
from comm_collectives.moe.options import MoeOptions as MoeOptions
from comm_collectives.moe.overlap import OverlappedMoe as OverlappedMoe
