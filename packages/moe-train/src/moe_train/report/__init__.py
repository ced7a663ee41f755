"""The room `report`."""

from moe_train.report.metrics import MetricsLog as MetricsLog
from moe_train.report.plots import write_plots as write_plots
from moe_train.report.progress import ProgressLine as ProgressLine
