"""The module that commands which use a checkpoint run on each rank.

run(["run_generate", "{...}"], context)
"""

from moe_train.inference.chat import run_chat
from moe_train.inference.evaluate import run_evaluation
from moe_train.inference.generate import run_generate
from moe_train.inference.running import Runner
from moe_train.rank import RankContext

_RUNNERS: dict[str, Runner] = {
    runner.__name__: runner for runner in (run_generate, run_chat, run_evaluation)
}


def run(argv: list[str], context: RankContext) -> None:
    """Run a job on this rank. Collective over all ranks.

    Args:
        argv: the name of a runner, and its job as JSON.
        context: asked whether to stop.
    """
    name, text = argv
    _RUNNERS[name](text, context)
