"""Coordinates and groups of real ranks, against a plain enumeration of the mesh."""

import itertools
import re
import socket
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from comm_collectives.call.groups import group_state
from moe_train.config import Config
from moe_train.errors import MoeTrainError
from moe_train.parallel import choose_device, make_mesh, own_group, start
from ranktest import collect_ranks, run_ranks

UNEVEN = [(3, 2, 1), (2, 1, 3), (1, 2, 3)]
GROUPS = (
    "ep_group",
    "dp_group",
    "data_group",
    "forward_group",
    "backward_group",
    "embedding_group",
)
Configure = Callable[..., Config]


def layout(configure: Configure, pp: int, dp: int, ep: int) -> Config:
    sizes = [f"parallel.pp={pp}", f"parallel.dp={dp}", f"parallel.ep={ep}"]
    return configure(*sizes, "train.global_batch_size=12", num_hidden_layers=6)


def expected_groups(pp: int, dp: int, ep: int, rank: int) -> dict[str, list[int] | None]:
    """The members of each group of `rank`, by the definition of each."""
    places = dict(enumerate(itertools.product(range(pp), range(dp), range(ep))))
    p, d, e = places[rank]

    def those(belongs: Callable[[int, int, int], bool]) -> list[int]:
        return [number for number, place in places.items() if belongs(*place)]

    pipe = those(lambda _, b, c: (b, c) == (d, e)) if pp > 1 else None
    ends = those(lambda a, *_: a in (0, pp - 1)) if pp > 1 and p in (0, pp - 1) else None
    return {
        "ep_group": those(lambda a, b, _: (a, b) == (p, d)),
        "dp_group": those(lambda a, _, c: (a, c) == (p, e)),
        "data_group": those(lambda a, *_: a == p),
        "forward_group": pipe,
        "backward_group": pipe,
        "embedding_group": ends,
    }


@pytest.mark.parametrize("sizes", UNEVEN, ids=str)
def test_coordinates_and_groups_are_those_of_a_row_major_mesh(
    configure: Configure, sizes: tuple[int, int, int]
) -> None:
    config = layout(configure, *sizes)
    limit = timedelta(seconds=config.parallel.timeout_s)

    def run(rank: int, _: int) -> object:
        parallel = start(config)
        members, totals = {}, {}
        for name in GROUPS:
            group = getattr(parallel, name)
            assert (
                group is None or group._get_backend(torch.device("cpu")).options._timeout == limit
            )
            members[name] = group and dist.get_process_group_ranks(group)
            if group is not None:
                total = torch.tensor(10.0**rank)
                dist.all_reduce(total, group=group)
                totals[name] = total.item()
        apart = parallel.forward_group is not parallel.backward_group or sizes[0] == 1
        place = (parallel.rank, parallel.stage, parallel.data_rank, parallel.num_data_ranks)
        ends = (parallel.is_first, parallel.is_last)
        return members, totals, apart, place, ends, parallel.num_stages

    pp, dp, ep = sizes
    for rank, got in enumerate(run_ranks(run, 6)):
        members, totals, apart, place, ends, num_stages = got  # type: ignore[misc]
        expected = expected_groups(pp, dp, ep, rank)
        assert members == expected, rank
        assert totals == {n: sum(10.0**r for r in m) for n, m in expected.items() if m}, rank
        stage, data_rank = divmod(rank, dp * ep)
        assert place == (rank, stage, data_rank, dp * ep)
        assert ends == (stage == 0, stage == pp - 1)
        assert num_stages == pp
        assert apart, "one direction would wait for the other"


def test_ranks_that_share_samples_are_neighbours_of_a_stage(configure: Configure) -> None:
    """Of 12 each three; and each six, of which two have the same positions and other heads."""
    jobs = [
        configure("parallel.pp=2", "parallel.ep=6", "parallel.cp=3"),
        configure("parallel.pp=2", "parallel.ep=6", "parallel.cp=3", "parallel.tp=2"),
    ]

    def run(rank: int, _: int) -> object:
        found = []
        for config in jobs:
            at = start(config)
            groups = (at.cp_group, at.sequence_group, at.tp.group, at.tensor_reduce_group)
            groups += (at.embedding_group,)
            members = [dist.get_process_group_ranks(group) if group else None for group in groups]
            place = at.sample_rank, at.num_sample_ranks, at.counts_samples, at.num_positions(8)
            found.append((members, place))
        return found

    for rank, (alone, shared) in enumerate(run_ranks(run, 12)):  # type: ignore[misc]
        three, pair, six = rank // 3 * 3, rank // 2 * 2, rank // 6 * 6
        same = [three, three + 1, three + 2]
        place = (rank % 6 // 3, 2, rank % 3 == 0, (3, 3, 2)[rank % 3])
        assert alone == ([same, same, None, None, list(range(12))], place)
        heads = [six + rank % 2 + 2 * other for other in range(3)]
        positions = (2, 1, 2, 1, 1, 1)[rank % 6]
        groups = [heads, list(range(six, six + 6)), [pair, pair + 1], heads]
        groups.append(list(range(rank % 2, 12, 2)))  # with the same rows of a shared embedding
        assert shared == (groups, (0, 1, rank % 6 == 0, positions))


def test_the_mesh_of_a_stage_holds_its_ranks_alone(configure: Configure) -> None:
    config = layout(configure, 2, 1, 3)

    def run(rank: int, _: int) -> object:
        mesh = start(config).stage_mesh
        return mesh.size, mesh.coordinate(rank)

    stages = run_ranks(run, 6)
    assert stages == [(3, {"dp": 0, "ep": rank % 3}) for rank in range(6)]


def test_the_mesh_of_a_configuration_is_made_without_ranks(configure: Configure) -> None:
    mesh = make_mesh(layout(configure, 3, 2, 1).parallel)
    assert mesh.size == 6
    assert mesh.coordinate(4) == {"pp": 2, "dp": 0, "ep": 0}
    assert list(map(list, mesh.groups("pp"))) == [[0, 2, 4], [1, 3, 5]]


def test_another_number_of_ranks_is_refused_on_every_rank_with_the_sizes(
    configure: Configure,
) -> None:
    config = layout(configure, 3, 2, 1)
    outcomes = collect_ranks(lambda *_: start(config), 2)
    for outcome in outcomes:
        assert outcome.error_type is not None and outcome.error is not None
        assert outcome.error.strip().endswith(
            "the job has 2 ranks but parallel.pp=3 x dp=2 x ep=1 needs 6; "
            "start 6 ranks or change the sizes"
        )


def test_every_group_compares_calls_as_often_as_the_job_says(configure: Configure) -> None:
    config = configure("parallel.pp=2", "parallel.ep=2", "parallel.agreement_every=3")

    def run(*_: int) -> set[int]:
        at = start(config)
        groups = at.ep_group, at.dp_group, at.data_group, at.forward_group, at.backward_group
        return {group_state(group).policy.every for group in groups if group is not None}

    assert run_ranks(run, 4) == [{3}] * 4


def test_only_members_get_the_group_that_all_ranks_make() -> None:
    def run(rank: int, _: int) -> list[int] | None:
        group = own_group([2, 0], rank, timedelta(seconds=30))
        return group and dist.get_process_group_ranks(group)

    assert run_ranks(run, 3) == [[0, 2], None, [0, 2]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_cuda_device_auto_is_the_cpu_and_cuda_is_refused() -> None:
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    message = "train.device='cuda' but torch sees no CUDA device; use 'auto' or 'cpu'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("cards", "variables", "wanted", "found"),
    [
        (4, {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}, "auto", "cuda:3"),
        (2, {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "auto", "cpu"),
        (2, {}, "auto", "cpu"),  # the launcher, which is told the number of ranks
        (1, {"LOCAL_WORLD_SIZE": "4", "SLURM_GPUS_PER_TASK": "1"}, "cuda", "cuda:0"),
        (2, {"LOCAL_WORLD_SIZE": "4", "SLURM_GPUS_PER_TASK": "2"}, "cuda", "cuda:0"),
    ],
)
def test_a_rank_takes_a_card_where_there_is_one_for_each(
    monkeypatch: pytest.MonkeyPatch,
    cards: int,
    variables: dict[str, str],
    wanted: str,
    found: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: cards)
    for name, value in {"SLURM_STEP_NUM_TASKS": "8", **variables}.items():
        monkeypatch.setenv(name, value)
    assert choose_device(wanted, 4) == torch.device(found)


def test_too_few_cards_are_refused_where_cards_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "2")  # of one task, which starts four ranks
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    with pytest.raises(ValueError, match="4 ranks on this machine but 2 CUDA devices; start fewer"):
        choose_device("cuda", 4)


def test_ranks_that_do_not_meet_are_told_where_and_why(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**place, "MASTER_PORT": str(taken.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(MoeTrainError, match=r"do not meet at 127.0.0.1:\d+ .*already in use"):
            start(configure("parallel.timeout_s=5"))
