import random

import pytest
import torch

from unified_ckpt import Box
from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry import BoxMeta
from unified_ckpt.plans.columns.box_table import NO_REPLICA, BoxTable, encode_boxes


def metas_of(table: BoxTable) -> list[dict[str, list[BoxMeta]]]:
    """Undo `encode_boxes` by the columns."""
    held: list[dict[str, list[BoxMeta]]] = [{} for _ in range(table.num_ranks)]
    everything = table.tuples(torch.arange(len(table.tensor)))
    for row, (shape, offset, local) in enumerate(everything):
        tensor = int(table.tensor[row])
        replica = NO_REPLICA if table.replica is None else int(table.replica[row])
        box = Box(shape, offset, local, replica_id=None if replica == NO_REPLICA else replica)
        meta = BoxMeta(table.keys[tensor], table.dtypes[int(table.dtype[row])], box)
        of_part = held[int(table.rank[row])].setdefault(table.parts[int(table.part[tensor])], [])
        assert int(table.index[row]) == len(of_part)
        of_part.append(meta)
    return held


def test_what_ranks_hold_comes_back_from_the_columns() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for wide in (1, 2**31, 2**40):
        held: list[dict[str, list[BoxMeta]]] = []
        for rank in range(5):
            metas = []
            for i in rng.sample(range(20), rng.randint(1, 9)):
                shape = tuple(rng.randint(1, 9) for _ in range(i % 4))
                shape = (wide, *shape) if rank == 3 else shape
                replica = rng.choice([None, -1, rank]) if rank > 1 else None
                box = Box(shape, (0,) * len(shape), shape, replica_id=replica)
                dtype = rng.choice(["F32", "I64", "BF16"])
                metas.append(BoxMeta(f"{'é' * (i % 2)}{i}", dtype, box))
            held.append({"optimizer": metas, "model": metas[:2]})
        table = BoxTable.of(map(encode_boxes, held))
        assert metas_of(table) == held, seed
        assert table.parts == ("model", "optimizer")
        assert list(table.keys_of("model")) == sorted(
            {m.key for parts in held for m in parts["model"]}
        )
        assert table.keys_of("ema") == () and table.shapes_of("ema") == {}


def test_a_part_without_boxes_is_there_and_keys_that_ranks_share_stand_once() -> None:
    box = BoxMeta("w", "F32", Box.whole((2,)))
    table = BoxTable.of([encode_boxes({"model": []}), encode_boxes({"ema": [box]})] * 300)
    assert table.parts == ("model", "ema") and list(table.keys) == ["w"]
    assert table.rank.tolist() == list(range(1, 600, 2))
    assert BoxTable.of([]).num_ranks == 0


def test_a_flat_range_cannot_be_planned() -> None:
    box = Box((4, 4), (0, 0), (4, 4), flattened_range=(1, 5))
    with pytest.raises(CheckpointValueError, match=r"model 'w': plan its unflattened boxes"):
        encode_boxes({"model": [BoxMeta("w", "F32", box)]})
