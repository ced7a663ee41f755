"""Where this rank stands: its mesh coordinate, device and process groups, made once.

The mesh axes are ("pp", "dp", "ep"), ranks row-major. Tokens are split over dp x ep ("data ranks"),
experts over ep, layers over pp. Attention has its own axes over the data ranks: each cp x tp
neighbours of them share the positions of the same samples, and the others hold other samples; each
tp neighbours share heads, the inner widths of dense MLPs and the vocabulary, and so have other
parameters. Experts have theirs over the same ranks (parallel folding): each etp neighbours share
the inner width of experts, then ep ranks the experts; the others hold the same shares of the same.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from comm_collectives import AgreementPolicy, set_agreement
from mesh_spmd import ProcessMesh
from moe_pipeline import make_pipeline_groups
from moe_train.config import Config, ParallelConfig
from moe_train.errors import MoeTrainError, TrainValueError
from moe_train.model.parallel import ALONE, WHOLE, PositionCut, TensorParallel

AXES = ("pp", "dp", "ep")
SIZES = (*AXES, "cp", "tp", "etp")
"""What `parallel.relayout` gives the sizes of."""
Sizes = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """This rank's place in the mesh and the groups it talks in.

    `stage` is this rank's place in the pipeline, of `num_stages`; `stages` are the numbers of the
    stages that it holds, which are several where a rank has several, and `has_last` says whether
    the last of all is among them. `data_rank` counts the ranks that hold other tokens of the
    same microbatch, from 0 to `num_data_ranks` - 1; of them `sequence_group` holds the same
    samples, each rank other positions (`cut`), and is None where a rank has whole samples: the
    ranks of `cp_group`, which have the same heads, times those of `tp`. Pipeline transfers have one
    group per direction, so that a transfer forwards never queues behind one backwards.
    `embedding_group` holds the ranks of the first and of the last stage with the same rows of the
    vocabulary, where these stages are on two ranks and this is one of them: they may share an
    embedding. `ep_group` shares out experts, `etp_group` (None of one rank) each of them, and
    `dp_group` holds the same of the same ones. `dense_reduce_group` and
    `expert_reduce_group` sum gradients: the ranks of `data_group` and `dp_group`, and groups of
    their own where that runs beside a backward, which makes calls in the others; so do
    `tensor_reduce_group` and `tensor_group`, the ranks with the same part of what those of `tp`
    share out. `is_alone`: the other ranks do not exist, and this one is built to learn its memory:
    without weights, its neighbours answered for.
    """

    mesh: ProcessMesh
    rank: int
    stage: int
    num_stages: int
    stages: tuple[int, ...]
    has_last: bool
    data_rank: int
    num_data_ranks: int
    device: torch.device
    ep_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    dense_reduce_group: dist.ProcessGroup
    expert_reduce_group: dist.ProcessGroup
    forward_group: dist.ProcessGroup | None
    backward_group: dist.ProcessGroup | None
    embedding_group: dist.ProcessGroup | None
    etp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    sequence_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    tensor_reduce_group: dist.ProcessGroup | None = None
    tp: TensorParallel = ALONE
    cut: PositionCut = WHOLE
    is_alone: bool = False

    @property
    def stage_mesh(self) -> ProcessMesh:
        """The ("dp", "ep") mesh of the ranks of this rank's pipeline stage."""
        return self.mesh.submesh("dp", "ep", of=self.rank)

    @property
    def num_sharing(self) -> int:
        """Ranks that share each sample: cp x tp."""
        return self.cut.outer.size * self.tp.size

    @property
    def counts_samples(self) -> bool:
        """Whether this rank is the first of those that share samples, which counts them for all."""
        return self.data_rank % self.num_sharing == 0

    @property
    def sample_rank(self) -> int:
        """Which part of a microbatch's samples this rank has, from 0 to `num_sample_ranks` - 1."""
        return self.data_rank // self.num_sharing

    @property
    def num_sample_ranks(self) -> int:
        """Into how many parts the samples of a microbatch are shared out."""
        return self.num_data_ranks // self.num_sharing

    def num_positions(self, length: int) -> int:
        """How many of the positions of a sample of this length this rank has."""
        return self.cut.lengths(length)[self.cut.rank]

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the embedding and needs input tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the head and needs labels."""
        return self.has_last


def make_mesh(config: ParallelConfig) -> ProcessMesh:
    """The mesh that the configuration asks for; pure data."""
    return ProcessMesh((config.pp, config.dp, config.ep), AXES)


def sample_mesh(config: ParallelConfig) -> ProcessMesh:
    """The same ranks by what attention needs: ("pp", "samples", "cp", "tp")."""
    sizes = (config.pp, config.num_sample_ranks, config.cp, config.tp)
    return ProcessMesh(sizes, ("pp", "samples", "cp", "tp"))


def expert_mesh(config: ParallelConfig) -> ProcessMesh:
    """The same ranks by what experts need: ("pp", "dp", "ep", "etp")."""
    sizes = (config.pp, config.dp // config.etp, config.ep, config.etp)
    return ProcessMesh(sizes, (*AXES, "etp"))


def cut_of(config: ParallelConfig, rank: int) -> PositionCut:
    """The positions of one of the cp x tp ranks that share samples."""
    cp_rank, tp_rank = divmod(rank, config.tp)
    is_folded = config.cp > 1 and config.cp_attention == "ring"
    cut = PositionCut(rank=cp_rank, size=config.cp, is_folded=is_folded)
    return cut if config.tp == 1 else PositionCut(rank=tp_rank, size=config.tp, within=cut)


def choose_device(wanted: str, local_ranks: int = 1) -> torch.device:
    """`auto` is CUDA when there is a card for each local rank. A rank takes that of its LOCAL_RANK.

    Where SLURM shows each task other cards (`--gpus-per-task`), it takes the first of them.

    Args:
        local_ranks: ranks on this machine, where LOCAL_WORLD_SIZE does not say it.

    Raises:
        ValueError: CUDA is asked for and there are too few cards.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrainValueError(
            "train.device='cuda' but torch sees no CUDA device; use 'auto' or 'cpu'"
        )
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local_ranks))
    num_cards = torch.cuda.device_count()
    if num_cards < local_ranks and _has_cards_of_its_own():
        return torch.device("cuda", 0)
    if num_cards < local_ranks and wanted == "cuda":
        raise TrainValueError(
            f"train.device='cuda' with {local_ranks} ranks on this machine but {num_cards} CUDA "
            "devices; start fewer ranks, or use 'cpu'"
        )
    if num_cards < local_ranks:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _has_cards_of_its_own() -> bool:
    """Whether SLURM shows each of several tasks other cards."""
    is_bound = "SLURM_GPUS_PER_TASK" in os.environ or "SLURM_GPU_BIND" in os.environ
    return is_bound and os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def set_num_threads(wanted: int | None = None) -> None:
    """Let torch use so many CPU threads; None: this rank's share of the cores it may run on."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(wanted or max(1, cores // ranks))


def start(config: Config, *, is_alone: bool = False) -> Parallel:
    """Join the training job and make every group; see `join`."""
    return join(config.parallel, config.train.device, is_alone=is_alone)


def join(config: ParallelConfig, wanted_device: str, *, is_alone: bool = False) -> Parallel:
    """Join the ranks of this layout and make every group. Collective over all ranks.

    Uses the process group of the caller if there is one, else the environment of torchrun: on CUDA
    with a backend for the host too, so that objects and control messages never stop the device, and
    bound to this rank's device, so that its communicators are made here and not at a first call.

    Raises:
        ValueError: the number of ranks is not pp x dp x ep.
        MoeTrainError: the ranks do not meet.
    """
    device = choose_device(wanted_device)
    timeout = timedelta(seconds=config.timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _meet(device, timeout)
    mesh = make_mesh(config)
    _check_ranks(config, dist.get_world_size())
    rank = dist.get_rank()
    at = mesh.coordinate(rank)

    def along(*axes: str, of: ProcessMesh = mesh) -> dist.ProcessGroup:
        return _group_of(of.groups(*axes), rank, config)

    along_experts = partial(along, of=expert_mesh(config))
    dp_group, data_group = along_experts("dp"), along("dp", "ep")
    overlaps = config.overlap_grad_reduce or config.sharding > 1
    forwards, backwards = _pipeline_groups(mesh, config, is_alone=is_alone)
    attention = _AttentionGroups.of(config, partial(along, of=sample_mesh(config)), overlaps)
    last = next(r for r in range(config.pp) if config.num_stages - 1 in config.stages_of(r))
    return Parallel(
        mesh=mesh,
        rank=rank,
        stage=at["pp"],
        num_stages=config.pp,
        stages=config.stages_of(at["pp"]),
        has_last=at["pp"] == last,
        data_rank=at["dp"] * config.ep + at["ep"],
        num_data_ranks=config.dp * config.ep,
        device=device,
        ep_group=along_experts("ep"),
        dp_group=dp_group,
        data_group=data_group,
        dense_reduce_group=along("dp", "ep") if overlaps else data_group,
        expert_reduce_group=along_experts("dp") if overlaps else dp_group,
        etp_group=along_experts("etp") if config.etp > 1 else None,
        forward_group=forwards,
        backward_group=backwards,
        embedding_group=_ends(config, mesh, last, timeout) if last else None,
        cp_group=attention.cp,
        sequence_group=attention.sequence,
        tensor_group=attention.tensor,
        tensor_reduce_group=attention.tensor_reduce,
        tp=TensorParallel(rank=rank % config.tp, size=config.tp, group=attention.tp),
        cut=cut_of(config, rank % (config.cp * config.tp)),
        is_alone=is_alone,
    )


def _meet(device: torch.device, timeout: timedelta) -> None:
    """Make the group of all ranks. Collective over them."""
    is_cuda = device.type == "cuda"
    backend, bound = ("cpu:gloo,cuda:nccl", device) if is_cuda else ("gloo", None)
    try:
        dist.init_process_group(backend, timeout=timeout, device_id=bound)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        at = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise MoeTrainError(
            f"the ranks do not meet at {at} (parallel.timeout_s={timeout.total_seconds():g}): "
            f"{str(error).splitlines()[0]}; start all of them, with MASTER_ADDR the host of rank 0 "
            "and MASTER_PORT free there"
        ) from error


def _check_ranks(config: ParallelConfig, num_ranks: int) -> None:
    if num_ranks != config.world_size:
        sizes = f"pp={config.pp} x dp={config.dp} x ep={config.ep}"
        raise TrainValueError(
            f"the job has {num_ranks} ranks but parallel.{sizes} needs {config.world_size}; start "
            f"{config.world_size} ranks or change the sizes"
        )


def _pipeline_groups(
    mesh: ProcessMesh, config: ParallelConfig, *, is_alone: bool
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's groups of its pipeline, forwards and backwards. Collective over all ranks."""
    if config.pp == 1:
        return None, None
    if is_alone:  # nobody is there to be connected to
        forwards, backwards = (_group_of(mesh.groups("pp"), dist.get_rank(), config) for _ in "fb")
        return forwards, backwards
    made = make_pipeline_groups(list(mesh.groups("pp")), timeout_s=config.timeout_s)
    for group in (made.forward, made.backward):
        set_agreement(AgreementPolicy(every=config.agreement_every), group=group)
    return made.forward, made.backward


def _ends(
    config: ParallelConfig, mesh: ProcessMesh, last: int, timeout: timedelta
) -> dist.ProcessGroup | None:
    """The ranks of the first and the last stage that hold the same rows of an embedding.

    None on a rank of another stage. Collective over all ranks.
    """
    ends = [r for r in range(mesh.size) if mesh.coordinate(r)["pp"] in (0, last)]
    parts = [[r for r in ends if r % config.tp == part] for part in range(config.tp)]
    groups = [own_group(ranks, dist.get_rank(), timeout) for ranks in parts]
    return next(filter(None, groups), None)


class _AttentionGroups(NamedTuple):
    """This rank's groups along the axes of attention; None of those with one rank."""

    cp: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    sequence: dist.ProcessGroup | None
    tensor: dist.ProcessGroup | None
    tensor_reduce: dist.ProcessGroup | None

    @classmethod
    def of(
        cls, config: ParallelConfig, along: Callable[..., dist.ProcessGroup], overlaps: bool
    ) -> "_AttentionGroups":
        """Make them. Collective over all ranks."""
        cp = along("cp") if config.cp > 1 else None
        if config.tp == 1:
            return cls(cp, None, cp, None, None)
        tp, tensor = along("tp"), along("samples", "cp")
        sequence = tp if cp is None else along("cp", "tp")
        return cls(cp, tp, sequence, tensor, along("samples", "cp") if overlaps else tensor)


def _group_of(
    groups: Iterable[Sequence[int]], rank: int, config: ParallelConfig
) -> dist.ProcessGroup:
    """Make groups that have each rank once; the one of this rank. Collective over all ranks."""
    # Not those of a DeviceMesh, whose limit is torch's own: ten minutes, or thirty.
    timeout = timedelta(seconds=config.timeout_s)
    group = next(filter(None, [own_group(ranks, rank, timeout) for ranks in groups]))
    set_agreement(AgreementPolicy(every=config.agreement_every), group=group)
    return group


def own_group(ranks: Sequence[int], rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Make a group of `ranks`; None where this rank is not in it. Collective over all ranks."""
    # Every rank takes part in making every group, as torch requires.
    group = dist.new_group(list(ranks), timeout=timeout)
    return group if rank in ranks and isinstance(group, dist.ProcessGroup) else None
