"""A change of layout carried out on ranks of this machine, each part compared with what it must be.

Plans are tested here with torch's gloo; who wires resharding into a trainer has other machines,
backends and versions of torch, and wants to know before the job runs.

May import: interop, reshard, creation, layout, mesh.
"""

from mesh_spmd.trials.case import Case as Case
from mesh_spmd.trials.report import Outcome as Outcome
from mesh_spmd.trials.report import Report as Report
from mesh_spmd.trials.report import check_on_ranks as check_on_ranks
