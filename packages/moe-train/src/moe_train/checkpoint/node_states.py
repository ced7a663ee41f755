"""States of a run on its nodes, between the checkpoints in storage.

A state is what a checkpoint holds of each rank, in a folder of its node and copied to other nodes;
unified-ckpt's tier does that. It serves the layout that saved it: under another one, or another
number of ranks, the checkpoint in storage is what a run goes on from, and one line says so.

    nodes = NodeStates.of(config)            # None without checkpoint.node_folder
    nodes.tier.save(parts, step=12, files=nodes.files)
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moe_train.config import OWN_TOML, Config, dump_toml
from unified_ckpt import load_files
from unified_ckpt.run import LoadError
from unified_ckpt.tiers import NodeTier, TierOptions, describe_recovery

LAYOUT_FILE = "node_layout.json"
_DIGEST_CHARS = 8
# Keys of [parallel] that say nothing about which rank holds what.
_NO_LAYOUT = {"timeout_s", "agreement_every", "overlap_grad_reduce", "cp_attention"}

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class NodeStates:
    """This rank's part in the states on the nodes. Close it when the run ends.

    Args:
        options: the node's folder, of this run alone.
        tier_steps: steps between states.
        storage_steps: steps between checkpoints; None where the clock alone decides.
        files: what a state holds beside tensors; written on every node.
    """

    options: TierOptions
    tier_steps: int
    storage_steps: int | None
    files: Mapping[str, bytes]
    _opened: NodeTier | None = field(default=None, init=False)

    @classmethod
    def of(cls, config: Config) -> "NodeStates | None":
        """What the job asks for; None where it asks for none."""
        asked = config.checkpoint
        if asked.node_folder is None:
            return None
        run = config.train.output_dir
        digest = hashlib.blake2b(run.encode()).hexdigest()[:_DIGEST_CHARS]
        folder = Path(asked.node_folder) / f"{Path(run).name}-{digest}"
        layout = json.dumps(_layout_of(config), sort_keys=True).encode()
        return cls(
            options=TierOptions(
                folder=folder,
                copies=asked.node_copies,
                timeout_s=max(config.parallel.timeout_s, 600.0),
            ),
            tier_steps=asked.node_interval_steps,
            storage_steps=asked.interval_steps,
            files={LAYOUT_FILE: layout, OWN_TOML: dump_toml(config).encode()},
        )

    @property
    def tier(self) -> NodeTier:
        """The tier. Collective when it is first asked for."""
        if self._opened is None:
            self._opened = NodeTier(self.options)
        return self._opened

    def goal(self) -> list[str]:
        """Lines for people: where copies are, and the steps that lost nodes cost at most."""
        return describe_recovery(
            self.tier.plan, tier_steps=self.tier_steps, storage_steps=self.storage_steps
        )

    def check_layout(self, source: Path) -> None:
        """Refuse a state of another layout.

        Raises:
            LoadError: it is one.
        """
        if load_files(source, LAYOUT_FILE) != self.files[LAYOUT_FILE]:
            raise LoadError(f"{source} was saved under another layout ([parallel] differs)")

    def close(self) -> None:
        """Release the folder of the node."""
        if self._opened is not None:
            self._opened.close()


def _layout_of(config: Config) -> dict[str, object]:
    keys = asdict(config.parallel).items()
    return {name: value for name, value in keys if name not in _NO_LAYOUT}
