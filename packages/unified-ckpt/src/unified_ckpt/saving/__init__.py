"""The collective save: every rank describes, plans, writes and agrees.

May import: state, plans, files, geometry.
"""

from unified_ckpt.saving.collective_save import SaveReport as SaveReport
from unified_ckpt.saving.collective_save import publish_written as publish_written
from unified_ckpt.saving.collective_save import save as save
from unified_ckpt.saving.collective_save import save_request as save_request
from unified_ckpt.saving.collective_save import write_rank as write_rank
from unified_ckpt.saving.request import STATE_NAME as STATE_NAME
from unified_ckpt.saving.request import STATE_VERSION as STATE_VERSION
from unified_ckpt.saving.request import Request as Request
from unified_ckpt.saving.request import make_request as make_request
