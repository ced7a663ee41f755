"""Parameters' names: those of modules, and those that wrappers have changed.

May import: no room.
"""

from unified_ckpt.state.naming.names import ModuleNames as ModuleNames
from unified_ckpt.state.naming.names import Names as Names
from unified_ckpt.state.naming.names import plain_key as plain_key
from unified_ckpt.state.naming.names import plain_name as plain_name
