"""What the commands that train and inspect run, checked before any rank starts.

May import: every other room, parallel and errors; comm_collectives, gpu_alloc, unified_ckpt,
weight_convert.
"""

from moe_train.jobs.export import export_weights as export_weights
from moe_train.jobs.inspect import describe_checkpoint as describe_checkpoint
from moe_train.jobs.job import check as check
from moe_train.jobs.job import has_begun as has_begun
from moe_train.jobs.job import train as train
from moe_train.jobs.plan import plan_report as plan_report
from moe_train.jobs.relayout import request_relayout as request_relayout
from moe_train.jobs.run_folder import run_folder as run_folder
from moe_train.jobs.samples import audit_samples as audit_samples
from moe_train.jobs.samples import write_samples as write_samples
from moe_train.jobs.verify_keys import verify_keys as verify_keys
from moe_train.jobs.verify_layouts import verify_layouts as verify_layouts
