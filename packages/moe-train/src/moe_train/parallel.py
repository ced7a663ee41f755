"""Where this rank stands: its mesh coordinate, device and process groups, made once.

The mesh axes are ("pp", "dp", "ep"), ranks row-major. Tokens are split over dp x ep ("data ranks"),
experts over ep, layers over pp. Attention has its own axes over the data ranks: each cp neighbours
of them share the positions of the same samples, and the others hold other samples.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mesh_spmd import ProcessMesh
from moe_train.config import Config, ParallelConfig
from moe_train.errors import TrainValueError
from moe_train.model.parallel import WHOLE, PositionCut

AXES = ("pp", "dp", "ep")
SIZES = (*AXES, "cp")
"""What `parallel.relayout` gives the sizes of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """This rank's place in the mesh and the groups it talks in.

    `stage` is this rank's place in the pipeline, of `num_stages`; `stages` are the numbers of the
    stages that it holds, which are several where a rank has several, and `has_last` says whether
    the last of all is among them. `data_rank` counts the ranks that hold other tokens of the
    same microbatch, from 0 to `num_data_ranks` - 1; of them `cp_group` holds the same samples, each
    rank other positions (`cut`), and is None where a rank has whole samples. Pipeline transfers
    have one group per direction, so that a transfer forwards never queues behind one backwards.
    `embedding_group` holds all ranks of the first and of the last stage, where these are on two
    ranks and this is one of them: they may share an embedding. `dense_reduce_group` and
    `expert_reduce_group` sum gradients: the ranks of `data_group` and `dp_group`, and groups of
    their own where that runs beside a backward, which makes calls in the others. `is_alone`: the
    other ranks do not exist, and this one is built to learn its memory: without weights, its
    neighbours answered for.
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
    cp_group: dist.ProcessGroup | None = None
    cut: PositionCut = WHOLE
    is_alone: bool = False

    @property
    def stage_mesh(self) -> ProcessMesh:
        """The ("dp", "ep") mesh of the ranks of this rank's pipeline stage."""
        return self.mesh.submesh("dp", "ep", of=self.rank)

    @property
    def cp(self) -> int:
        """Ranks that share each sample."""
        return self.cut.size

    @property
    def cp_rank(self) -> int:
        """Which part of its samples' positions this rank has, from 0 to cp - 1."""
        return self.cut.rank

    @property
    def sample_rank(self) -> int:
        """Which part of a microbatch's samples this rank has, from 0 to `num_sample_ranks` - 1."""
        return self.data_rank // self.cp

    @property
    def num_sample_ranks(self) -> int:
        """Into how many parts the samples of a microbatch are shared out."""
        return self.num_data_ranks // self.cp

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
    """The same ranks by what attention needs: ("pp", "samples", "cp")."""
    return ProcessMesh((config.pp, config.num_sample_ranks, config.cp), ("pp", "samples", "cp"))


def cut_of(config: ParallelConfig, cp_rank: int) -> PositionCut:
    """The positions of one of the ranks that share samples."""
    return PositionCut(rank=cp_rank, size=config.cp, is_folded=config.cp_attention == "ring")


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


def start(config: Config) -> Parallel:
    """Join the training job and make every group; see `join`."""
    return join(config.parallel, config.train.device)


def join(config: ParallelConfig, wanted_device: str) -> Parallel:
    """Join the ranks of this layout and make every group. Collective over all ranks.

    Uses the process group of the caller if there is one, else the environment of torchrun: on CUDA
    with a backend for the host too, so that objects and control messages never stop the device, and
    bound to this rank's device, so that its communicators are made here and not at a first call.

    Raises:
        ValueError: the number of ranks is not pp x dp x ep.
    """
    device = choose_device(wanted_device)
    timeout = timedelta(seconds=config.timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        is_cuda = device.type == "cuda"
        backend, bound = ("cpu:gloo,cuda:nccl", device) if is_cuda else ("gloo", None)
        dist.init_process_group(backend, timeout=timeout, device_id=bound)
    mesh = make_mesh(config)
    if dist.get_world_size() != mesh.size:
        sizes = f"pp={config.pp} x dp={config.dp} x ep={config.ep}"
        raise TrainValueError(
            f"the job has {dist.get_world_size()} ranks but parallel.{sizes} needs {mesh.size}; "
            f"start {mesh.size} ranks or change the sizes"
        )
    rank = dist.get_rank()
    at = mesh.coordinate(rank)
    pipelined = config.pp > 1

    def along(*axes: str, of: ProcessMesh = mesh) -> dist.ProcessGroup:
        # Not those of a DeviceMesh, whose limit is torch's own: ten minutes, or thirty.
        groups = [own_group(ranks, rank, timeout) for ranks in of.groups(*axes)]
        return next(filter(None, groups))

    dp_group, data_group = along("dp"), along("dp", "ep")
    overlaps = config.overlap_grad_reduce or config.sharding > 1
    last = next(r for r in range(config.pp) if config.num_stages - 1 in config.stages_of(r))
    ends = [r for r in range(mesh.size) if mesh.coordinate(r)["pp"] in (0, last)]
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
        ep_group=along("ep"),
        dp_group=dp_group,
        data_group=data_group,
        dense_reduce_group=along("dp", "ep") if overlaps else data_group,
        expert_reduce_group=along("dp") if overlaps else dp_group,
        forward_group=along("pp") if pipelined else None,
        backward_group=along("pp") if pipelined else None,
        embedding_group=own_group(ends, rank, timeout) if last else None,
        cp_group=along("cp", of=sample_mesh(config)) if config.cp > 1 else None,
        cut=cut_of(config, sample_mesh(config).coordinate(rank)["cp"]),
    )


def own_group(ranks: Sequence[int], rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Make a group of `ranks`; None where this rank is not in it. Collective over all ranks."""
    # Every rank takes part in making every group, as torch requires.
    group = dist.new_group(list(ranks), timeout=timeout)
    return group if rank in ranks and isinstance(group, dist.ProcessGroup) else None
