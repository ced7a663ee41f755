"""The process that writes snapshots beside training, and how all savers meet.

May import: tiers, folders, snapshots, saving, files/storage, geometry.
"""

from unified_ckpt.saver_process.answers import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from unified_ckpt.saver_process.answers import error_from_json as error_from_json
from unified_ckpt.saver_process.answers import report_from_json as report_from_json
from unified_ckpt.saver_process.rendezvous import connect_store as connect_store
from unified_ckpt.saver_process.rendezvous import host_store as host_store
from unified_ckpt.saver_process.rendezvous import post_failure as post_failure
