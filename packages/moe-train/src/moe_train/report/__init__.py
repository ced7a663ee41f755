"""What people see of a run: metrics, the progress line, pictures.

May import: data, errors.
"""

from moe_train.report.metrics import METRICS_FILE as METRICS_FILE
from moe_train.report.metrics import MetricsLog as MetricsLog
from moe_train.report.phases import phase as phase
from moe_train.report.plots import write_plots as write_plots
from moe_train.report.progress import ProgressLine as ProgressLine
from moe_train.report.run_record import RunRecord as RunRecord
