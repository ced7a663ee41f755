from moe_train.config.tables import Config as Config
from moe_train.config.toml_file import dump_toml as dump_toml
from moe_train.config.toml_file import load_config as load_config
from moe_train.data.order import SampleOrder as SampleOrder
from moe_train.data.packing import Batch as Batch
from moe_train.data.packing import PackedSplit as PackedSplit
from moe_train.data.prepare import PreparedCorpus as PreparedCorpus
from moe_train.data.prepare import prepare as prepare
from moe_train.data.unigram import unigram_cross_entropy as unigram_cross_entropy
from moe_train.errors import MoeTrainError as MoeTrainError
from moe_train.errors import RankFailedError as RankFailedError
from moe_train.jobs.generate import generate_text as generate_text
from moe_train.jobs.inspect import describe_checkpoint as describe_checkpoint
from moe_train.jobs.plan import plan_report as plan_report
from moe_train.launch.local import run_local as run_local
from moe_train.launch.signals import StopFlag as StopFlag
from moe_train.report.metrics import MetricsLog as MetricsLog
from moe_train.report.plots import write_plots as write_plots
from moe_train.report.progress import ProgressLine as ProgressLine

__all__ = [
    "Batch",
    "Config",
    "MetricsLog",
    "MoeTrainError",
    "PackedSplit",
    "PreparedCorpus",
    "ProgressLine",
    "RankFailedError",
    "SampleOrder",
    "StopFlag",
    "describe_checkpoint",
    "dump_toml",
    "generate_text",
    "load_config",
    "plan_report",
    "prepare",
    "run_local",
    "unigram_cross_entropy",
    "write_plots",
]
