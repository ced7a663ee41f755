"""How a checkpoint stores AdamW's moments: as the optimizer holds them, or in one byte an element.

One byte is unified-ckpt's block-wise code: exact to 1/254 of the largest of 64 neighbours, 1/255 in
the square root for the second moment. Weights, master weights and Muon's momentum stay exact. A
parameter that is trained only since a resume has its first update stored beside its moments.

    save(parts, checkpoint_id=target, options=save_options("int8"))
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch

from moe_train.checkpoint.parts import has_part
from unified_ckpt import SaveOptions, Shard, load, read_index
from unified_ckpt.files.storage import Location

Moments = Literal["exact", "int8"]

LOSSY = (
    "%s holds AdamW's moments in one byte an element (checkpoint.moments), so the run does not go "
    "on bit for bit as it would have"
)
_FIRST_UPDATE = "/first_update"


def save_options(moments: Moments) -> SaveOptions | None:
    """What a save of such moments is asked for."""
    return SaveOptions(moment_compression="int8") if moments == "int8" else None


def first_updates(counts: Mapping[str, int]) -> list[Shard]:
    """Name -> updates that the run had made before: one integer each, whoever holds it."""
    return [
        Shard.of(name + _FIRST_UPDATE, torch.tensor([count]), global_shape=(1,), offset=(0,))
        for name, count in counts.items()
    ]


def read_first_updates(source: Path | Location, names: Iterable[str]) -> dict[str, int]:
    """Those of these parameters of which the checkpoint stores one."""
    keys = read_index(source, "optimizer").keys() if has_part(source, "optimizer") else ()
    stored = first_updates(dict.fromkeys((n for n in names if n + _FIRST_UPDATE in keys), 0))
    if stored:
        load(stored, checkpoint_id=source, part="optimizer")
    return {each.key.removesuffix(_FIRST_UPDATE): int(each.tensor) for each in stored}
