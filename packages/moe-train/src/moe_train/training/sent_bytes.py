"""The bytes that a step's exchanges send, measured where `plan` computes them.

    with sent_bytes(config, parallel) as figures:
        runner.train(...)
    figures["sent_bytes/dispatch"]

Gradients and what the pipeline hands on go through torch and are not in the figures.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from comm_collectives.call.groups import count_wire_bytes
from moe_train.config import Config
from moe_train.parallel import Parallel


@contextmanager
def sent_bytes(config: Config, parallel: Parallel) -> Iterator[dict[str, object]]:
    """Count what this rank sends meanwhile; filled in at the end, where `log.sent_bytes` asks."""
    figures: dict[str, object] = {}
    groups = {
        "dispatch": parallel.ep_group,
        "experts": parallel.etp_group,
        "attention": parallel.cp_group,
        "tensor": parallel.tp.group,
    }
    with ExitStack() as stack:
        counted = {
            kind: stack.enter_context(count_wire_bytes(group))
            for kind, group in groups.items()
            if config.log.sent_bytes and group is not None
        }
        yield figures
    figures |= {f"sent_bytes/{kind}": of.num_wire_bytes for kind, of in counted.items()}
