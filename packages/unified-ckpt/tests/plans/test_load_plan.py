import pytest

from unified_ckpt import Box
from unified_ckpt.errors import LoadError
from unified_ckpt.geometry import BoxMeta
from unified_ckpt.geometry.regions import Region
from unified_ckpt.plans import StoredTensor, plan_load
from unified_ckpt.plans.load_plan import SplitTensor

STORED = {
    "w": StoredTensor(dtype="F32", shape=(4, 6), file="b.safetensors", begin=80, end=176),
    "v": StoredTensor(dtype="F32", shape=(4,), file="a.safetensors", begin=96, end=112),
    "q": StoredTensor(dtype="F6_E2M3", shape=None, file="a.safetensors", begin=112, end=115),
}


def want(key: str, global_shape: tuple, offset: tuple, shape: tuple, dtype: str = "F32") -> BoxMeta:
    return BoxMeta(key, dtype, Box(global_shape, offset, shape))


def test_only_the_bytes_of_the_box_are_read_in_file_order() -> None:
    plan = plan_load([want("w", (4, 6), (2, 0), (2, 6)), want("v", (4,), (1,), (2,))], STORED)
    assert [(r.file, r.region, r.want_index) for r in plan.reads] == [
        ("a.safetensors", Region(100, 8), 1),
        ("b.safetensors", Region(128, 48), 0),
    ]
    assert plan.num_bytes == 56


def test_columns_become_strided_reads_and_chunks_stay_small() -> None:
    plan = plan_load([want("w", (4, 6), (0, 3), (4, 3))], STORED, chunk_bytes=24)
    assert [r.region for r in plan.reads] == [
        Region(92, 12, (2,), (24,)),
        Region(140, 12, (2,), (24,)),
    ]
    assert [r.offset for r in plan.reads] == [(0, 0), (2, 0)]


def test_empty_wants_read_nothing_and_missing_keys_are_listed_once() -> None:
    wants = [
        want("w", (4, 6), (4, 0), (0, 6)),
        want("x", (1,), (0,), (1,)),
        want("x", (1,), (0,), (1,)),
    ]
    plan = plan_load(wants, STORED)
    assert (plan.reads, plan.missing) == ((), ("x",))


@pytest.mark.parametrize(
    ("box", "cast", "message"),
    [
        (
            want("w", (6, 4), (0, 0), (6, 4)),
            False,
            r"'w' in b.safetensors: stored shape is \(4, 6\)",
        ),
        (want("w", (4, 6), (0, 0), (4, 6), "BF16"), False, "stored dtype is F32.*cast=True"),
        (want("w", (4, 6), (0, 0), (4, 6), "F4"), True, "F4 cannot be cast"),
        (want("q", (4,), (0,), (4,)), True, "stored shape is None"),
    ],
)
def test_what_does_not_fit_is_named(box: BoxMeta, cast: bool, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        plan_load([box], STORED, cast=cast)


def test_cast_plans_the_bytes_of_the_stored_dtype() -> None:
    plan = plan_load([want("w", (4, 6), (0, 0), (1, 6), "BF16")], STORED, cast=True)
    assert plan.num_bytes == 24


def test_boxes_kept_sharded_are_read_where_they_overlap_the_want() -> None:
    halves = (
        ((0, 0), StoredTensor(dtype="F32", shape=(2, 6), file="a", begin=80, end=128)),
        ((2, 0), StoredTensor(dtype="F32", shape=(2, 6), file="b", begin=8, end=56)),
    )
    split = {"w": SplitTensor(dtype="F32", shape=(4, 6), boxes=halves)}
    plan = plan_load([want("w", (4, 6), (1, 2), (2, 3))], split)
    assert [(r.file, r.region, r.offset, r.shape) for r in plan.reads] == [
        ("a", Region(112, 12), (0, 0), (1, 3)),
        ("b", Region(16, 12), (1, 0), (1, 3)),
    ]
    hole = {"w": SplitTensor(dtype="F32", shape=(4, 6), boxes=halves[:1])}
    with pytest.raises(LoadError, match="'w': the stored boxes hold 3 of the 6 elements"):
        plan_load([want("w", (4, 6), (1, 2), (2, 3))], hole)
