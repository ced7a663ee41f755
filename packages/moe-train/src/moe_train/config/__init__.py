"""The job's configuration: one TOML file, its tables and keys, and the messages for mistakes.

May import: errors. Torch is not imported, so that `--help` and a mistake answer at once.
"""

from moe_train.config.changes import KeyChange as KeyChange
from moe_train.config.data_tables import PYTHON_STDLIB as PYTHON_STDLIB
from moe_train.config.data_tables import SourceConfig as SourceConfig
from moe_train.config.optimizer_tables import OptimizerConfig as OptimizerConfig
from moe_train.config.parallel_table import ParallelConfig as ParallelConfig
from moe_train.config.tables import Config as Config
from moe_train.config.toml_file import OWN_TOML as OWN_TOML
from moe_train.config.toml_file import STATE_FILE as STATE_FILE
from moe_train.config.toml_file import dump_toml as dump_toml
from moe_train.config.toml_file import format_compact as format_compact
from moe_train.config.toml_file import keys_help as keys_help
from moe_train.config.toml_file import load_config as load_config
