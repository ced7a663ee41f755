"""Says what a directory holds, and whether two directories hold the same.

A room of its own: it reads what the others write, and writes nothing.

May import: opinions, plan, cutting, outputs, operations, specs, files, staging.
"""

from weight_convert.verification.comparison import LEVELS as LEVELS
from weight_convert.verification.comparison import VerifyReport as VerifyReport
from weight_convert.verification.comparison import verify as verify
from weight_convert.verification.explanation import Explanation as Explanation
from weight_convert.verification.explanation import explain as explain
from weight_convert.verification.inspection import Summary as Summary
from weight_convert.verification.inspection import inspect as inspect
from weight_convert.verification.sizes import rank_bytes as rank_bytes
from weight_convert.verification.sizes import tensor_tree as tensor_tree
