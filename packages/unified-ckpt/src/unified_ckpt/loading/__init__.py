"""Fill a state in place from a checkpoint of any layout.

May import: saving, state, plans, files, devices, geometry.
"""

from unified_ckpt.loading.collective_load import LoadReport as LoadReport
from unified_ckpt.loading.collective_load import fill_state as fill_state
from unified_ckpt.loading.collective_load import load as load
from unified_ckpt.loading.dcp_keys import DCP_NAME as DCP_NAME
from unified_ckpt.loading.dcp_keys import DcpRecord as DcpRecord
from unified_ckpt.loading.dcp_keys import Prefixes as Prefixes
from unified_ckpt.loading.part_index import PartIndex as PartIndex
from unified_ckpt.loading.reader import Destination as Destination
from unified_ckpt.loading.reader import Reader as Reader
from unified_ckpt.loading.sources import read_dcp_record as read_dcp_record
from unified_ckpt.loading.sources import read_values as read_values
from unified_ckpt.loading.together import read_together as read_together
