"""The sub-commands: each a file with `add(parser)` for its options and `run(arguments)`.

May import: all rooms below, the jobs late, so that `--help` answers without importing torch.
"""

from moe_train.commands.chat import CHAT as CHAT
from moe_train.commands.data import DATA as DATA
from moe_train.commands.evaluate import EVAL as EVAL
from moe_train.commands.export import EXPORT as EXPORT
from moe_train.commands.generate import GENERATE as GENERATE
from moe_train.commands.inspect import INSPECT as INSPECT
from moe_train.commands.options import OVERRIDE as OVERRIDE
from moe_train.commands.options import Command as Command
from moe_train.commands.plan import PLAN as PLAN
from moe_train.commands.relayout import RELAYOUT as RELAYOUT
from moe_train.commands.train import TRAIN as TRAIN
from moe_train.commands.verify_layouts import VERIFY_LAYOUTS as VERIFY_LAYOUTS
