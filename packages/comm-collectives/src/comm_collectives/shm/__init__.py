"""The backend `comm_shm`: torch's collectives through the shared memory of one host.

May import: base, call, collectives.
"""

from comm_collectives.shm.backend import BACKEND_NAME as BACKEND_NAME
from comm_collectives.shm.backend import ShmBackend as ShmBackend
from comm_collectives.shm.registration import register_backends as register_backends
