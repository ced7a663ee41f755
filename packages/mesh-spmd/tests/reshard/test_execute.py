"""Plans carried out, against the whole tensor: every rank ends with its box of the known values.

Ranks are threads that meet at a barrier, so that hundreds of random cases take seconds; some run on
gloo processes as well.
"""

import itertools
import math
import os
import random
import socket
import stat
import struct
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mesh_spmd import (
    FlatSpec,
    MeshStateError,
    MeshTypeError,
    MeshValueError,
    Plan,
    ProcessMesh,
    Spec,
    TensorSpec,
    Topology,
    execute,
    plan_reshard,
)
from mesh_spmd.reshard.execute import Place, run_steps
from ranktest import run_ranks

SIZES = [0, 1, 2, 3, 5, 7, 8, 12, 13]
REDUCE: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": lambda x, dim: x.sum(dim),
    "avg": lambda x, dim: x.sum(dim) / x.shape[dim],
    "max": lambda x, dim: x.amax(dim),
    "min": lambda x, dim: x.amin(dim),
    "product": lambda x, dim: x.prod(dim),
}


class Lockstep:
    """An all-to-all between threads; counts what each one gives to others."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.barrier = threading.Barrier(len(self.ranks))
        self.board: dict[tuple[int, int], torch.Tensor] = {}
        self.sent = dict.fromkeys(ranks, 0)

    def of(self, rank: int) -> Callable[..., None]:
        def between(
            output: torch.Tensor, given: torch.Tensor, splits: Sequence[Sequence[int]]
        ) -> None:
            assert sum(splits[0]) == output.numel() and sum(splits[1]) == given.numel()
            for peer, part in zip(self.ranks, given.split(list(splits[1])), strict=True):
                assert peer != rank or part.numel() == 0, "a rank sends to itself"
                self.board[rank, peer] = part
                self.sent[rank] += part.numel()
            self.barrier.wait(60)
            parts = [self.board[peer, rank] for peer in self.ranks]
            assert [p.numel() for p in parts] == list(splits[0]), "the two ends disagree"
            if output.numel():
                output.copy_(torch.cat(parts))
            self.barrier.wait(60)

        return between


def run_in_threads(
    plan: Plan, locals_of: dict[int, list[torch.Tensor | None]], ranks: Sequence[int]
) -> tuple[dict[int, list[torch.Tensor | None]], Lockstep]:
    lockstep = Lockstep(ranks)
    found: dict[int, list[torch.Tensor | None]] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        place = Place(rank=rank, peers=tuple(ranks), device=torch.device("cpu"))
        try:
            found[rank] = list(run_steps(plan, locals_of[rank], place, lockstep.of(rank)))
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            errors.append(error)
            lockstep.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found, lockstep


def random_spec(
    chance: random.Random, mesh: ProcessMesh, shape: tuple[int, ...], kinds: Sequence[str] = ()
) -> Spec | FlatSpec:
    choices = [Replicate(), *[Shard(d) for d in range(len(shape))] * 2, *map(Partial, kinds)]
    placements = [chance.choice(choices) for _ in mesh.axis_names]
    order = list(mesh.axis_names)
    chance.shuffle(order)
    sizes = {}
    for dim, size in enumerate(shape):
        axes = [a for a in order if placements[mesh.axis_index(a)] == Shard(dim)]
        if axes and chance.random() < 0.5:  # the outermost axis has ragged parts
            cuts = sorted(chance.randint(0, size) for _ in range(mesh.axis_size(axes[0]) - 1))
            sizes[axes[0]] = [b - a for a, b in itertools.pairwise([0, *cuts, size])]
    spec = Spec(mesh, tuple(placements), tuple(order), sizes)
    free = [a for a, p in zip(mesh.axis_names, placements, strict=True) if p == Replicate()]
    if free and chance.random() < 0.3:
        return FlatSpec(spec, tuple(chance.sample(free, chance.randint(1, len(free)))))
    return spec


def random_mesh(chance: random.Random, world: int) -> ProcessMesh:
    shape = chance.choice([(2, 2), (3,), (2, 3), (4,), (1, 2, 2), (2, 1, 3), (5,), (6,), (1,)])
    return ProcessMesh(
        shape, tuple("abc"[: len(shape)]), chance.sample(range(world), math.prod(shape))
    )


def part_of(whole: torch.Tensor, tensor: TensorSpec, rank: int) -> torch.Tensor:
    part = whole[tensor.box(rank).slices()].contiguous()
    if isinstance(tensor.spec, FlatSpec):
        begin, end = tensor.flat_range(rank)
        part = part.flatten()[begin:end]
    return part.clone()


def addends(
    chance: random.Random, tensor: TensorSpec
) -> tuple[torch.Tensor, dict[tuple[int, ...], torch.Tensor]]:
    """Random addends for each coordinate on partial axes, and the value that they make."""
    kinds = tensor.partials
    sizes = [tensor.mesh.axis_size(axis) for axis in kinds]
    seed = torch.Generator().manual_seed(chance.randrange(2**31))
    stack = torch.randint(-3, 4, (*sizes, *tensor.shape), generator=seed).to(torch.float64)
    value = stack
    for axis, kind in reversed(list(enumerate(kinds.values()))):
        value = REDUCE[kind](value, axis)
    coordinates = itertools.product(*(range(size) for size in sizes))
    return value, {at: stack[at] for at in coordinates}


def local_parts(
    chance: random.Random, tensor: TensorSpec, ranks: Sequence[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor | None]]:
    value, stack = addends(chance, tensor)
    parts: dict[int, torch.Tensor | None] = dict.fromkeys(ranks)
    for rank in tensor.mesh.ranks:
        at = tensor.mesh.coordinate(rank)
        parts[rank] = part_of(stack[tuple(at[a] for a in tensor.partials)], tensor, rank)
    return value, parts


def assert_holds(
    value: torch.Tensor, tensor: TensorSpec, found: dict[int, torch.Tensor | None], case: str
) -> None:
    """What the ranks hold makes `value`, partial values after they are reduced."""
    kinds = tensor.partials
    for rank in found.keys() - set(tensor.mesh.ranks):
        assert found[rank] is None, case
    for rank in tensor.mesh.ranks:
        part = found[rank]
        assert part is not None and tuple(part.shape) == tensor.local_shape(rank), case
    others = [a for a in tensor.mesh.axis_names if a not in kinds]
    sizes = [tensor.mesh.axis_size(a) for a in kinds]
    for at in itertools.product(*(range(tensor.mesh.axis_size(a)) for a in others)):
        fixed = dict(zip(others, at, strict=True))
        ranks = [
            tensor.mesh.rank_at(**fixed, **dict(zip(kinds, index, strict=True)))
            for index in itertools.product(*(range(size) for size in sizes))
        ]
        held = torch.stack([found[r] for r in ranks])  # type: ignore[misc]
        held = held.reshape((*sizes, *held.shape[1:]))
        for axis, kind in reversed(list(enumerate(kinds.values()))):
            held = REDUCE[kind](held, axis)
        expected = part_of(value, tensor, ranks[0])
        # All addends are small whole numbers, so that only averages are rounded.
        tolerance = 1e-12 if "Partial(avg)" in case else 0.0
        torch.testing.assert_close(held, expected, rtol=tolerance, atol=tolerance, msg=case)


def check_case(seed: int, kinds: Sequence[str], topology: Topology | None = None) -> None:
    chance = random.Random(seed)
    world = 8
    ranks = list(range(world))
    chance.shuffle(ranks)
    before, after = random_mesh(chance, world), random_mesh(chance, world)
    if chance.random() < 0.4:
        after = before
    sources, targets = [], []
    for _ in range(chance.randint(1, 3)):
        shape = tuple(chance.choice(SIZES) for _ in range(chance.randint(0, 3)))
        ends = (random_spec(chance, mesh, shape, kinds) for mesh in (before, after))
        a, b = (TensorSpec(shape, torch.float64, spec) for spec in ends)
        sources.append(a)
        targets.append(b)
    few = chance.choice([2**25, chance.randint(1, 500)])
    plan = plan_reshard(sources, targets, topology, buffer_bytes=few)
    made = [local_parts(chance, tensor, ranks) for tensor in sources]
    given = {rank: [parts[rank] for _, parts in made] for rank in ranks}
    found, lockstep = run_in_threads(plan, given, ranks)
    for number, tensor in enumerate(targets):
        held = {rank: found[rank][number] for rank in ranks}
        case = f"seed {seed}, tensor {number}: {sources[number]} -> {tensor}"
        assert_holds(made[number][0], tensor, held, case)
    assert {r: n for r, n in lockstep.sent.items() if n} == {
        r: n for r, n in plan.sent_bytes.items() if n
    }


def test_every_rank_ends_with_its_part_of_the_whole() -> None:
    first = random.randrange(2**32)
    for seed in range(first, first + 60):
        check_case(seed, ())


def test_partial_values_are_reduced_kept_and_made() -> None:
    first = random.randrange(2**32)
    for seed in range(first, first + 60):
        check_case(seed, ("sum", "max", "min", "avg", "product"))


def test_ways_over_several_layouts_end_with_the_same() -> None:
    first = random.randrange(2**32)
    slow = Topology(ranks_per_node=2, near_latency_s=1e-3, far_latency_s=1e-2)
    for seed in range(first, first + 25):
        check_case(seed, ("sum",), slow)


def test_running_ranks_end_with_their_parts_and_the_bytes_are_those_of_the_plan() -> None:
    seed = random.randrange(2**32)

    def fn(rank: int, world_size: int) -> None:
        chance = random.Random(seed)
        sent = 0

        def counted(output: torch.Tensor, input: torch.Tensor, **options: object) -> None:
            nonlocal sent
            splits = options["input_split_sizes"]
            assert isinstance(splits, list) and splits[rank] == 0
            sent += input.numel()
            dist.all_to_all_single(output, input, **options)

        for number in range(12):
            meshes = [random_mesh(chance, world_size) for _ in range(2)]
            shape = tuple(chance.choice(SIZES) for _ in range(chance.randint(1, 3)))
            a, b = (
                TensorSpec(shape, dtype, random_spec(chance, mesh, shape, kinds))
                for mesh, kinds, dtype in zip(
                    meshes, (("sum", "max"), ()), [torch.float64] * 2, strict=True
                )
            )
            value, parts = local_parts(chance, a, range(world_size))
            plan, sent = plan_reshard(a, b), 0
            found = execute(plan, parts[rank], exchange=counted)
            case = f"seed {seed}, case {number}: {a} -> {b}"
            assert sent == plan.sent_bytes.get(rank, 0), case
            if b.mesh.position(rank) is None:
                assert found is None, case
            else:
                assert torch.equal(found, part_of(value, b, rank)), case
        check_mistakes(rank)

    run_ranks(fn, 6, timeout_s=120)


def check_mistakes(rank: int) -> None:
    mesh = ProcessMesh((2,), ("ep",))
    one = TensorSpec((6, 2), torch.float32, Spec(mesh, (Shard(0),)))
    plan = plan_reshard(one, TensorSpec((6, 2), torch.float32, Spec(mesh, (Shard(1),))))
    wrong = [torch.zeros(2, 2), torch.zeros(3, 2, dtype=torch.int32), None]
    errors = [MeshValueError, MeshTypeError, MeshTypeError]
    for local, error in zip(wrong, errors, strict=True):
        if rank in mesh.ranks:
            with pytest.raises(error, match=f"rank {rank}: local tensor 0"):
                execute(plan, local)
    if rank not in mesh.ranks:
        with pytest.raises(MeshTypeError, match="must be None, the rank is outside"):
            execute(plan, torch.zeros(3, 2))
    far = TensorSpec((6, 2), torch.float32, Spec(ProcessMesh((2,), ("ep",), (5, 6)), (Shard(0),)))
    with pytest.raises(MeshStateError, match=r"ranks \[6\], which the group of 6 ranks lacks"):
        execute(plan_reshard(one, far), torch.zeros(3, 2) if rank < 2 else None)


def tcp_bytes() -> tuple[int, int]:
    """What the kernel has counted on this process's TCP sockets: bytes sent, and received."""
    sent = received = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
        except OSError:  # that of the folder, closed by now
            continue
        with socket.socket(fileno=os.dup(int(name))) as opened:
            if opened.family == socket.AF_INET and opened.type == socket.SOCK_STREAM:
                info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                received += struct.unpack_from("Q", info, 128)[0]
                every, again = struct.unpack_from("QQ", info, 200)
                sent += every - again  # a loaded machine sends some bytes twice
    return sent, received


def kernel_counts_bytes() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = tcp_bytes()
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            one.sendall(bytes(1234))
            other.recv(1234, socket.MSG_WAITALL)
            return [b - a for a, b in zip(before, tcp_bytes(), strict=True)] == [1234, 1234]


@pytest.mark.skipif(not kernel_counts_bytes(), reason="this kernel counts no bytes of sockets")
def test_the_sockets_carry_the_bytes_of_the_plan() -> None:
    """The kernel's counts, less what gloo writes before each message and for barriers."""
    seed, world, header = random.randrange(2**32), 6, 256
    mesh = ProcessMesh((2, 3), ("a", "b"))
    chance = random.Random(seed)
    cases = [
        [
            TensorSpec((40, 33, 25), torch.float64, random_spec(chance, mesh, (40, 33, 25), kinds))
            for kinds in ((["max"], [])[number % 2], [])
        ]
        for number in range(10)
    ]
    plans = [plan_reshard(a, b) for a, b in cases]

    def fn(rank: int, world_size: int) -> None:
        for plan in plans:
            local = torch.zeros(plan.sources[0].local_shape(rank), dtype=torch.float64)
            dist.barrier()
            before = tcp_bytes()
            dist.barrier()
            execute(plan, local)
            dist.barrier()  # all have arrived, so that nothing waits in a socket
            found = [b - a for a, b in zip(before, tcp_bytes(), strict=True)]
            turns = sum(step.rounds for step in plan.steps)
            for count, planned in zip(found, (plan.sent_bytes, plan.received_bytes), strict=True):
                more = count - planned[rank]
                case = f"seed {seed}: {plan.sources} -> {plan.targets}"
                assert 0 <= more <= header * (world - 1) * (turns + 3), f"{more} more, {case}"

    run_ranks(fn, world, timeout_s=120)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_every_kind_of_partial_beside_another_one(dtype: torch.dtype) -> None:
    """Pairs of kinds on two axes, the last axis reduced first, into shards and into replicas."""
    folds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "any": lambda x: x.any(0),
        "all": lambda x: x.all(0),
        "max": lambda x: x.amax(0),
        "min": lambda x: x.amin(0),
        "sum": lambda x: x.sum(0),
        "product": lambda x: x.prod(0),
    }
    kinds = ["any", "all"] if dtype == torch.bool else ["max", "min", "sum", "product"]
    mesh = ProcessMesh((2, 3), ("a", "b"))
    for outer, inner in itertools.product(kinds, repeat=2):
        for placements in ((Shard(0), Shard(1)), (Replicate(), Replicate())):
            source = TensorSpec((5, 7), dtype, Spec(mesh, (Partial(outer), Partial(inner))))
            target = TensorSpec((5, 7), dtype, Spec(mesh, placements))
            addend = torch.randint(0, 2 if dtype == torch.bool else 5, (2, 3, 5, 7)).to(dtype)
            value = folds[outer](torch.stack([folds[inner](row) for row in addend]))
            given: dict[int, list[torch.Tensor | None]] = {
                rank: [addend[rank // 3, rank % 3].clone()] for rank in mesh.ranks
            }
            plan = plan_reshard(source, target, buffer_bytes=random.choice([20, 2**25]))
            found, _ = run_in_threads(plan, given, mesh.ranks)
            for rank in mesh.ranks:
                (part,) = found[rank]
                case = f"{outer} of {inner} to {placements}"
                assert part is not None and torch.equal(part, part_of(value, target, rank)), case


def test_a_partial_value_is_made_around_one_that_stays() -> None:
    """A product whose other factors are sums that stay partial: these sums have to be 1."""
    kinds = ["max", "min", "sum", "product", "avg"]
    mesh = ProcessMesh((2, 3), ("a", "b"))
    for before, after, stays in itertools.product(kinds, repeat=3):
        source = TensorSpec((2,), torch.float64, Spec(mesh, (Partial(before), Partial(stays))))
        target = TensorSpec((2,), torch.float64, Spec(mesh, (Partial(after), Partial(stays))))
        value, given = local_parts(random.Random(), source, mesh.ranks)
        plan = plan_reshard(source, target)
        found, _ = run_in_threads(plan, {r: [part] for r, part in given.items()}, mesh.ranks)
        case = f"{source} -> {target}"
        assert_holds(value, target, {rank: parts[0] for rank, parts in found.items()}, case)


def test_tensors_of_several_dtypes_travel_in_one_exchange() -> None:
    mesh = ProcessMesh((3,), ("ep",))
    dtypes = [torch.uint8, torch.float64, torch.bfloat16, torch.bool, torch.complex64]
    sources = [TensorSpec((5, 3), d, Spec(mesh, (Shard(0),))) for d in dtypes]
    targets = [TensorSpec((5, 3), d, Spec(mesh, (Shard(1),))) for d in dtypes]
    whole = [torch.arange(15).reshape(5, 3).to(d) for d in dtypes]
    given: dict[int, list[torch.Tensor | None]] = {
        rank: [part_of(w, t, rank) for w, t in zip(whole, sources, strict=True)]
        for rank in mesh.ranks
    }
    plan = plan_reshard(sources, targets)
    found, lockstep = run_in_threads(plan, given, mesh.ranks)
    for rank in mesh.ranks:
        for part, w, t in zip(found[rank], whole, targets, strict=True):
            assert part is not None and torch.equal(part, part_of(w, t, rank))
    assert lockstep.sent == plan.sent_bytes
    assert len(plan.steps) == plan.steps[0].rounds == 1


def test_conjugate_and_negative_views_travel_behind_odd_bytes() -> None:
    """What torch conjugates or negates when it is read has other bytes in memory."""
    mesh = ProcessMesh((3,), ("ep",))
    whole = [
        torch.arange(5, dtype=torch.uint8),
        torch.randn(5, dtype=torch.complex64),
        torch.randn(5),
    ]
    sources = [TensorSpec((5,), w.dtype, Spec(mesh, (Shard(0),))) for w in whole]
    targets = [TensorSpec((5,), w.dtype, Spec(mesh, (Replicate(),))) for w in whole]
    given: dict[int, list[torch.Tensor | None]] = {}
    for rank in mesh.ranks:
        small, wide, real = (part_of(w, t, rank) for w, t in zip(whole, sources, strict=True))
        negative = torch.complex(real, real).conj().imag
        assert wide.conj().is_conj() and negative.is_neg()
        given[rank] = [small, wide.conj(), negative]
    found, _ = run_in_threads(plan_reshard(sources, targets), given, mesh.ranks)
    for rank in mesh.ranks:
        small, wide, real = found[rank]
        assert torch.equal(small, whole[0])
        assert torch.equal(wide, whole[1].conj())
        assert torch.equal(real, -whole[2])


def test_what_is_no_tensor_of_one_device_is_refused_before_anything_moves() -> None:
    """Rank 0 holds the tensors, rank 1 nothing."""
    one = TensorSpec((2,), torch.float32, Spec(ProcessMesh((1,), ("a",)), (Replicate(),)))
    plan = plan_reshard([one, one], [one, one])

    def fn(rank: int, world_size: int) -> None:
        device_mesh = ProcessMesh((2,), ("b",)).to_device_mesh("cpu")
        good = torch.zeros(0 if rank else 2)
        dtensor = DTensor.from_local(good, device_mesh, [Replicate()], run_check=False)
        for given, error, text in (
            (
                [good, good.to("meta")],
                MeshValueError,
                "local tensor 1 lies on meta, and one before",
            ),
            ([good, dtensor], MeshTypeError, "local tensor 1 is a DTensor; give its part"),
            ([good, [0.0, 0.0]], MeshTypeError, "local tensor 1 must be a tensor, or None"),
            (5, MeshTypeError, "a local tensor, None or a list, got the int 5"),
        ):
            with pytest.raises(error, match=text):
                execute(plan, given)  # type: ignore[arg-type]

    run_ranks(fn, 2)


def test_execute_needs_a_process_group() -> None:
    mesh = ProcessMesh((2,), ("ep",))
    one = TensorSpec((6,), torch.float32, Spec(mesh, (Shard(0),)))
    with pytest.raises(MeshStateError, match="resharding needs a process group"):
        execute(plan_reshard(one, one), torch.zeros(3))


def test_experts_and_flat_moments_are_the_same_bits_after_other_numbers_of_ranks() -> None:
    """64 experts: ep 8 -> 16 -> 4 -> 8, ragged on the way, weights and flat optimizer states."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    shape, ranks = (64, 3, 5), range(16)

    def layout(ep: int, *, ragged: bool) -> Spec:
        mesh = ProcessMesh((16 // ep, ep), ("dp", "ep"))
        cuts = sorted(chance.randint(0, 64) for _ in range(ep - 1))
        parts = [b - a for a, b in itertools.pairwise([0, *cuts, 64])]
        return Spec.from_axes(mesh, {"ep": Shard(0)}, sizes={"ep": parts} if ragged else None)

    specs = [layout(8, ragged=False), layout(16, ragged=True), layout(4, ragged=True)]
    specs.append(specs[0])
    states: list[list[TensorSpec]] = [
        [
            TensorSpec(shape, torch.bfloat16, spec),
            TensorSpec(shape, torch.float32, FlatSpec(spec, ("dp",))),
        ]
        for spec in specs
    ]
    whole = [torch.randn(shape).to(tensor.dtype) for tensor in states[0]]
    held: dict[int, list[torch.Tensor | None]] = {
        rank: [part_of(w, t, rank) for w, t in zip(whole, states[0], strict=True)] for rank in ranks
    }
    for before, after in itertools.pairwise(states):
        plan = plan_reshard(before, after)
        held, lockstep = run_in_threads(plan, held, ranks)
        assert lockstep.sent == plan.sent_bytes
        for rank in ranks:
            lacking = sum(
                missing(a, b, rank) * a.dtype.itemsize for a, b in zip(before, after, strict=True)
            )
            assert plan.received_bytes[rank] == lacking, f"seed {seed}"
            for part, w, t in zip(held[rank], whole, after, strict=True):
                assert part is not None and torch.equal(part, part_of(w, t, rank)), f"seed {seed}"


def missing(before: TensorSpec, after: TensorSpec, rank: int) -> int:
    """Elements that a rank wants and lacks, counted on a numbered tensor."""
    numbered = torch.arange(before.numel).reshape(before.shape)
    had, wanted = (set(part_of(numbered, t, rank).flatten().tolist()) for t in (before, after))
    return len(wanted - had)
