import json
import random

import pytest

from unified_ckpt import Box
from unified_ckpt.geometry import BoxMeta
from unified_ckpt.plans import plan_save


def box(
    key: str,
    global_shape: tuple,
    offset: tuple | None = None,
    shape: tuple | None = None,
    dtype: str = "F32",
) -> BoxMeta:
    return BoxMeta(
        key,
        dtype,
        Box(
            global_shape,
            offset if offset is not None else (0,) * len(global_shape),
            shape if shape is not None else global_shape,
        ),
    )


def test_one_small_file_has_transformers_name_and_no_index() -> None:
    plan = plan_save([{"model": [box("w", (2, 3))], "optimizer": [box("w/m", (2, 3))]}])
    assert [f.name for f in plan.files] == ["model.safetensors", "optimizer.safetensors"]
    assert plan.indexes == {}


def test_replicas_are_written_once_and_balanced_by_bytes() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    boxes = [box(f"w{i}", (rng.randint(1, 1000),)) for i in range(200)]
    plan = plan_save([{"model": boxes}] * 4)
    assert sum(plan.rank_bytes) == sum(4 * b.box.numel for b in boxes)
    assert max(plan.rank_bytes) - min(plan.rank_bytes) <= 4000, seed
    # One file per rank, and every file is written by one rank alone.
    assert [{p.rank for p in f.pieces} for f in plan.files] == [{0}, {1}, {2}, {3}]


def test_balance_counts_the_boxes_that_only_one_rank_holds() -> None:
    shared = [box(f"s{i}", (100,)) for i in range(10)]
    plan = plan_save([{"model": [*shared, box("own", (1000,))]}, {"model": shared}])
    assert plan.rank_bytes == (4000, 4000)


def test_the_pieces_of_every_file_tile_its_bytes() -> None:
    plan = plan_save(
        [
            {"model": [box("a", (6, 4), (0, 0), (6, 2)), box("c", ())]},
            {"model": [box("a", (6, 4), (0, 2), (6, 2)), box("b", (5,), dtype="BF16")]},
        ],
        chunk_bytes=8,
    )
    for file in plan.files:
        covered = list(range(len(file.header)))
        for piece in file.pieces:
            assert piece.region.num_bytes <= 8
            for start in piece.region.run_starts():
                covered += range(start, start + piece.region.run_bytes)
        assert sorted(covered) == list(range(file.num_bytes))


def test_a_split_tensor_shares_a_file_and_its_header_has_one_owner() -> None:
    held = [{"model": [box("a", (4, 4), (0, 2 * r), (4, 2)), box(f"own{r}", (8,))]} for r in (0, 1)]
    plan = plan_save(held)
    assert [({p.rank for p in f.pieces}, f.owner) for f in plan.files] == [
        ({0}, 0),
        ({1}, 1),
        ({0, 1}, 0),
    ]
    assert [[e.key for e in f.entries] for f in plan.files] == [["own0"], ["own1"], ["a"]]


def test_files_are_cut_at_max_shard_bytes_and_listed_in_the_index() -> None:
    plan = plan_save([{"model": [box(f"w{i}", (10,)) for i in range(5)]}], max_shard_bytes=80)
    assert [f.name for f in plan.files] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    index = json.loads(plan.indexes["model.safetensors.index.json"])
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"] == {e.key: f.name for f in plan.files for e in f.entries}
    huge = plan_save([{"model": [box("w", (100,))]}], max_shard_bytes=80)
    assert [f.name for f in huge.files] == ["model.safetensors"]


def test_wide_dtypes_come_first_so_that_every_tensor_is_aligned() -> None:
    plan = plan_save(
        [
            {
                "model": [
                    box("a", (3,), dtype="U8"),
                    box("b", (1,), dtype="F64"),
                    box("c", (5,), dtype="BF16"),
                ]
            }
        ]
    )
    assert [e.key for e in plan.files[0].entries] == ["b", "c", "a"]
    assert all(e.begin % 8 == 0 for e in plan.files[0].entries[:1])


def test_empty_parts_and_empty_boxes_are_planned() -> None:
    plan = plan_save([{"model": [], "optimizer": [box("z", (0, 3))]}, {}])
    assert [(f.name, len(f.entries)) for f in plan.files] == [
        ("model.safetensors", 0),
        ("optimizer.safetensors", 1),
    ]
    uneven = plan_save(
        [{"model": [box("w", (1, 3))]}, {"model": [box("w", (1, 3), (1, 0), (0, 3))]}]
    )
    assert uneven.rank_bytes == (12, 0)
    assert plan_save([{}]).files == ()


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (
            [[box("w", (4,))], [box("w", (5,))]],
            r"'w': rank 0 says F32 \(4,\), rank 1 says F32 \(5,\)",
        ),
        ([[box("w", (4,))], [box("w", (4,), dtype="BF16")]], "rank 1 says BF16"),
        ([[box("w", (4,), (0,), (2,))], []], r"no rank holds 2 of its 4 elements; held: \[0:2\]"),
        (
            [[box("w", (4,), (0,), (3,))], [box("w", (4,), (2,), (2,))]],
            "overlap without being equal",
        ),
        ([[box("w", (4,), (0,), (0,))], []], "held: nothing"),
    ],
)
def test_conflicts_holes_and_overlaps_are_named(held: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_save([{"model": boxes} for boxes in held])


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        plan_save([{}], max_shard_bytes=0)


def test_the_plan_does_not_depend_on_the_order_in_which_a_rank_lists_its_boxes() -> None:
    seed = random.randrange(2**32)
    boxes = [box(f"w{i}", (i + 1,)) for i in range(20)]
    shuffled = random.Random(seed).sample(boxes, len(boxes))
    one, two = plan_save([{"model": boxes}] * 2), plan_save([{"model": boxes}, {"model": shuffled}])
    assert [f.entries for f in one.files] == [f.entries for f in two.files], seed
