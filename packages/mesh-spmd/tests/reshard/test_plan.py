"""Plans against bounds that a separate program computes from sets of elements, by max-flow."""

import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from mesh_spmd import (
    FlatSpec,
    MeshTypeError,
    MeshValueError,
    Plan,
    ProcessMesh,
    Spec,
    TensorSpec,
    plan_reshard,
)

MESHES = [(2, 4), (4, 8), (2, 2, 4), (3, 5)]
Owned = dict[int, set[int]]  # rank -> numbers of the elements that it holds


def owned(tensor: TensorSpec) -> Owned:
    """What torch's own slices of the numbered tensor give to each rank."""
    numbered = torch.arange(tensor.numel).reshape(tensor.shape)
    found = {}
    for rank in tensor.mesh.ranks:
        begin, end = tensor.flat_range(rank)
        found[rank] = set(numbered[tensor.box(rank).slices()].flatten()[begin:end].tolist())
    return found


def busiest_receiver(pairs: Iterable[tuple[Owned, Owned, int]]) -> int:
    missing: Counter[int] = Counter()
    for before, after, itemsize in pairs:
        for rank, wanted in after.items():
            missing[rank] += len(wanted - before.get(rank, set())) * itemsize
    return max(missing.values(), default=0)


def busiest_sender(pairs: Iterable[tuple[Owned, Owned, int]]) -> int:
    """The least L such that every need can be met with no rank sending more than L bytes.

    Exact for elements of one size, which are what is counted; of several sizes, bytes are.
    """
    pairs = list(pairs)
    unit = min(itemsize for _, _, itemsize in pairs)
    due: Counter[frozenset[int]] = Counter()  # by the set of holders
    for before, after, itemsize in pairs:
        holders: dict[int, set[int]] = {}
        for rank, elements in before.items():
            for element in elements:
                holders.setdefault(element, set()).add(rank)
        for rank, wanted in after.items():
            for element in wanted - before.get(rank, set()):
                due[frozenset(holders[element])] += itemsize // unit
    total = sum(due.values())
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        if max_flow(due, middle) == total:
            high = middle
        else:
            low = middle + 1
    return low * unit


def max_flow(due: Counter[frozenset[int]], limit: int) -> int:
    """Edmonds-Karp: source -> sets of holders -> holders, each of which sends `limit` at most."""
    room: dict[object, dict[object, int]] = {"source": {}, "sink": {}}
    for holders, amount in due.items():
        room["source"][holders] = amount
        room.setdefault(holders, {})["source"] = 0
        for rank in holders:
            room[holders][rank] = amount
            room.setdefault(rank, {"sink": limit})[holders] = 0
            room["sink"][rank] = 0
    flow = 0
    while True:
        before: dict[object, object] = {"source": None}
        queue = deque(["source"])
        while queue and "sink" not in before:
            here = queue.popleft()
            for there, left in room[here].items():
                if left and there not in before:
                    before[there] = here
                    queue.append(there)  # type: ignore[arg-type]
        if "sink" not in before:
            return flow
        path = ["sink"]
        while before[path[-1]] is not None:
            path.append(before[path[-1]])  # type: ignore[arg-type]
        steps = list(itertools.pairwise(reversed(path)))
        pushed = min(room[a][b] for a, b in steps)
        for a, b in steps:
            room[a][b] -= pushed
            room[b][a] += pushed
        flow += pushed


def all_placements(mesh: ProcessMesh, ndim: int) -> list[tuple[Placement, ...]]:
    kinds = [Replicate(), *map(Shard, range(ndim))]
    return list(itertools.product(kinds, repeat=len(mesh.shape)))


def assert_at_the_limit(plan: Plan, case: str) -> None:
    pairs = [
        (owned(a), owned(b), a.dtype.itemsize)
        for a, b in zip(plan.sources, plan.targets, strict=True)
    ]
    limit = busiest_receiver(pairs), busiest_sender(pairs)
    assert plan.busiest_bytes == limit, f"{case}: (received, sent) {plan.busiest_bytes}, {limit}"


def assert_within_the_blocks(plan: Plan, case: str) -> None:
    """No buffer is larger than the source and target blocks of its rank, or than 1 MiB."""
    blocks = [
        {r: math.prod(t.local_shape(r)) * t.dtype.itemsize for r in t.mesh.ranks}
        for t in (*plan.sources, *plan.targets)
    ]
    for rank, peak in plan.peak_bytes.items():
        held, made = (of.get(rank, 0) for of in blocks)
        # Messages are cut between elements, so that a round may have one more of each.
        more = 2 * (len(plan.ranks) - 1) * plan.sources[0].dtype.itemsize
        more = more if plan.steps[0].rounds > 1 else 0
        room = max(held + made, 2**20) + more
        assert peak - made <= room, f"{case}: buffers of rank {rank}"


def check_pairs(
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    count: int,
    check: Callable[[Plan, str], None] = assert_at_the_limit,
) -> int:
    mesh = ProcessMesh(mesh_shape, tuple("abc"[: len(mesh_shape)]))
    pairs = list(itertools.permutations(all_placements(mesh, len(shape)), 2))
    for before, after in random.sample(pairs, min(count, len(pairs))):
        source = TensorSpec(shape, torch.float32, Spec(mesh, before))
        target = TensorSpec(shape, torch.float32, Spec(mesh, after))
        plan = plan_reshard(source, target)
        check(plan, f"{shape} on {mesh_shape}: {before} -> {after}")
    return len(pairs)


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("shape", [(8, 8, 16), (7, 5, 3)])
def test_the_busiest_rank_moves_the_least_that_is_possible(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    assert check_pairs(mesh_shape, shape, 12) >= 200


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("shape", [(256, 256, 256), (241, 255, 257)])
def test_buffers_hold_no_more_than_both_blocks(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Blocks between 1 and 32 MiB, but for those that every rank has whole."""
    check_pairs(mesh_shape, shape, 12, assert_within_the_blocks)


def test_a_small_tensor_goes_to_any_number_of_ranks_in_one_exchange() -> None:
    mesh = ProcessMesh((64,), ("dp",))
    for source in Spec(ProcessMesh((1,), ("dp",)), (Shard(0),)), Spec(mesh, (Shard(0),)):
        before = TensorSpec((512,), torch.float32, source)
        after = TensorSpec((512,), torch.float32, Spec(mesh, (Replicate(),)))
        (step,) = plan_reshard(before, after).steps
        assert step.rounds == 1
        (step,) = plan_reshard(before, after, buffer_bytes=512).steps
        assert step.rounds > 1


def test_other_meshes_ragged_parts_and_flat_ranges_are_at_the_limit_too() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    whole = ProcessMesh((2, 4), ("dp", "ep"))
    stage = whole.submesh("ep", of={"dp": 1})
    other = ProcessMesh((3, 2), ("dp", "ep"), range(8, 14))
    for _ in range(12):
        parts = Counter(chance.choices(range(4), k=13))
        ragged = Spec.from_axes(whole, {"ep": Shard(0)}, sizes={"ep": [parts[i] for i in range(4)]})
        layouts: list[Spec | FlatSpec] = [
            ragged,
            FlatSpec(ragged, ("dp",)),
            Spec.from_axes(whole, {"ep": Shard(1), "dp": Shard(1)}, order=("ep", "dp")),
            Spec.from_axes(stage, {"ep": Shard(0)}),
            FlatSpec(Spec.from_axes(other, {"ep": Shard(1)}), ("dp",)),
            Spec.from_axes(other, {}),
        ]
        before, after = chance.sample(layouts, 2)
        source, target = (TensorSpec((13, 5), torch.bfloat16, s) for s in (before, after))
        assert_at_the_limit(plan_reshard(source, target), f"seed {seed}: {before} -> {after}")


def test_senders_are_balanced_over_a_list_of_tensors() -> None:
    mesh = ProcessMesh((2, 4), ("dp", "ep"))
    only = ProcessMesh((1,), ("dp",), (0,))
    # Rank 0 alone holds the first tensor; so all others send the second one, which all hold.
    sources = [
        TensorSpec((70,), torch.float32, Spec.from_axes(only, {})),
        TensorSpec((50,), torch.float32, Spec.from_axes(mesh, {})),
    ]
    new = ProcessMesh((2,), ("dp",), (8, 9))
    targets = [TensorSpec(t.shape, t.dtype, Spec.from_axes(new, {"dp": Shard(0)})) for t in sources]
    plan = plan_reshard(sources, targets)
    pairs = [(owned(a), owned(b), 4) for a, b in zip(sources, targets, strict=True)]
    assert plan.busiest_bytes == (busiest_receiver(pairs), busiest_sender(pairs)) == (240, 280)
    assert plan.sent_bytes[0] == 280


def over_the_limit(
    sources: list[TensorSpec], targets: list[TensorSpec], case: str
) -> tuple[int, int]:
    """What the busiest sender sends above the bound, and the bound, in bytes."""
    plan = plan_reshard(sources, targets)
    pairs = [(owned(a), owned(b), a.dtype.itemsize) for a, b in zip(sources, targets, strict=True)]
    received, sent = plan.busiest_bytes
    assert received == busiest_receiver(pairs), case
    limit = busiest_sender(pairs)
    assert sent == max(plan.sent_bytes.values()) >= limit, case
    for rank in plan.ranks:
        pieces = [
            (p.end - p.begin) * plan.steps[0].moves[p.move].dtype.itemsize for p in plan.sends(rank)
        ]
        assert sum(pieces) == plan.sent_bytes[rank], case
    return sent - limit, limit


ONE_SIZE, TWO_SIZES = [torch.float32], [torch.bfloat16, torch.float32]
THREE_SIZES = [torch.uint8, torch.bfloat16, torch.int64]


def random_list(chance: random.Random, dtypes: list[torch.dtype]) -> list[list[TensorSpec]]:
    """Six tensors before and after, on meshes of which some overlap and some do not."""
    whole = ProcessMesh((2, 2, 2), ("a", "b", "c"))
    meshes = [
        whole,
        whole.submesh("b", "c", of={"a": 1}),
        ProcessMesh((3,), ("x",), (1, 4, 6)),
        ProcessMesh((2, 2), ("x", "y"), range(6, 10)),
    ]

    def spec() -> Spec:
        mesh = chance.choice(meshes)
        return Spec(mesh, chance.choice(all_placements(mesh, 2)))

    shapes = [(chance.randint(1, 12), chance.randint(1, 12)) for _ in range(6)]
    kinds = [chance.choice(dtypes) for _ in shapes]
    return [[TensorSpec(s, k, spec()) for s, k in zip(shapes, kinds, strict=True)] for _ in "ab"]


def elements_over(made: list[list[TensorSpec]], case: str) -> float:
    """What the busiest sender sends above the bound, in elements of the widest kind."""
    return over_the_limit(made[0], made[1], case)[0] / max(t.dtype.itemsize for t in made[0])


@pytest.mark.parametrize("dtypes", [ONE_SIZE, TWO_SIZES, THREE_SIZES])
def test_lists_of_random_tensors_are_at_the_limit(dtypes: list[torch.dtype]) -> None:
    """With elements of several sizes, by less than one of the widest above that of bytes."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for case in range(12):
        made = random_list(chance, dtypes)
        assert elements_over(made, f"seed {seed}, list {case}") < 1, f"seed {seed}, list {case}"


@pytest.mark.parametrize("mixed", [False, True])
def test_ranks_that_share_tensors_in_a_chain_even_out_along_all_of_it(mixed: bool) -> None:
    """Each tensor is held by two neighbours; nearly all that is to be sent is at one end."""
    new = ProcessMesh((1,), ("x",), (99,))
    sources = []
    for rank, numel in enumerate([1000] * 10 + [10] * 10):
        pair = ProcessMesh((2,), ("x",), (rank, rank + 1))
        dtype = torch.bfloat16 if mixed and rank % 2 else torch.float32
        sources.append(TensorSpec((numel,), dtype, Spec(pair, (Replicate(),))))
    targets = [TensorSpec(s.shape, s.dtype, Spec(new, (Replicate(),))) for s in sources]
    over, limit = over_the_limit(sources, targets, "chain")
    assert limit < 4000 and over < (4 if mixed else 1)


def test_a_plan_of_no_tensors_moves_nothing() -> None:
    plan = plan_reshard([], [])
    assert plan.busiest_bytes == (0, 0) and plan.ranks == () and plan.hash


def test_replicated_to_sharded_moves_nothing() -> None:
    mesh = ProcessMesh((2, 4), ("dp", "ep"))
    source = TensorSpec((64, 8), torch.float32, Spec.from_axes(mesh, {}))
    target = TensorSpec((64, 8), torch.float32, Spec.from_axes(mesh, {"ep": Shard(0)}))
    plan = plan_reshard(source, target)
    assert plan.busiest_bytes == (0, 0)
    assert len(plan.copies(3)) == 1 and not plan.sends(3) and not plan.receives(3)


def test_a_partial_sum_is_scattered_as_it_is_reduced() -> None:
    from torch.distributed.tensor import Partial

    mesh = ProcessMesh((4,), ("dp",))
    source = TensorSpec((64,), torch.float32, Spec(mesh, (Partial(),)))
    sharded = TensorSpec((64,), torch.float32, Spec(mesh, (Shard(0),)))
    whole = TensorSpec((64,), torch.float32, Spec(mesh, (Replicate(),)))
    assert plan_reshard(source, sharded).busiest_bytes == (192, 192)  # 3 addends of 16 elements
    assert plan_reshard(source, whole).busiest_bytes == (384, 384)  # and a gather: not 768
    assert len(plan_reshard(source, whole).steps) == 2


def test_both_ends_of_every_message_agree_and_hashes_are_equal() -> None:
    mesh = ProcessMesh((2, 4, 8), ("pp", "dp", "ep"))
    stage = mesh.submesh("dp", "ep", of={"pp": 1})
    source = TensorSpec((60, 33), torch.bfloat16, Spec.from_axes(mesh, {"ep": Shard(0)}))
    target = TensorSpec(
        (60, 33), torch.bfloat16, Spec.from_axes(stage, {"ep": Shard(1), "dp": Shard(0)})
    )
    plan, again = plan_reshard(source, target), plan_reshard(source, target)
    assert plan.hash == again.hash != plan_reshard(target, source).hash
    sent = {
        (rank, p.peer, p.offset, p.shape, p.begin, p.end)
        for rank in plan.ranks
        for p in plan.sends(rank)
    }
    got = {
        (p.peer, rank, p.offset, p.shape, p.begin, p.end)
        for rank in plan.ranks
        for p in plan.receives(rank)
    }
    assert sent == got
    for rank in plan.ranks:
        assert sum(p.end - p.begin for p in plan.sends(rank)) * 2 == plan.sent_bytes[rank]
        assert sum(p.end - p.begin for p in plan.receives(rank)) * 2 == plan.received_bytes[rank]


def test_mistakes_are_named() -> None:
    mesh = ProcessMesh((4,), ("ep",))
    one = TensorSpec((8,), torch.float32, Spec(mesh, (Shard(0),)))
    with pytest.raises(MeshValueError, match="resharding keeps shape and dtype"):
        plan_reshard(one, TensorSpec((9,), torch.float32, one.spec))
    with pytest.raises(MeshValueError, match="1 source and 2 target"):
        plan_reshard([one], [one, one])
    with pytest.raises(MeshTypeError, match="TensorSpec or a list"):
        plan_reshard([one, 3], [one, one])  # type: ignore[list-item]
    from torch.distributed.tensor import Partial

    averaged = TensorSpec((8,), torch.int64, Spec(mesh, (Partial("avg"),)))
    with pytest.raises(MeshTypeError, match="no exact result"):
        plan_reshard(averaged, TensorSpec((8,), torch.int64, one.spec))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16])
def test_reductions_that_torch_lacks_are_refused_before_anything_moves(dtype: torch.dtype) -> None:
    mesh = ProcessMesh((2,), ("dp",))
    source = TensorSpec((4,), dtype, Spec(mesh, (Partial("sum"),)))
    target = TensorSpec((4,), dtype, Spec(mesh, (Shard(0),)))
    with pytest.raises(MeshTypeError, match=r"torch has no Partial\('sum'\) of torch"):
        plan_reshard(source, target)


@pytest.mark.parametrize("shape", [(1 << 33, 1 << 33), (0, 1 << 63), (1 << 61, 1)])
def test_tensors_beyond_64_bits_are_refused(shape: tuple[int, ...]) -> None:
    spec = Spec(ProcessMesh((2,), ("dp",)), (Replicate(),))
    with pytest.raises(MeshValueError, match="more bytes than 64 bits count"):
        TensorSpec(shape, torch.float32, spec)
