"""Which rank of which job this process is, by the variables of whatever started it.

torchrun sets RANK, WORLD_SIZE and the like, which torch reads; srun and mpirun have names of their
own, and those are translated. Invariant: a process that was started alone is no rank: a batch
script, an interactive shell of an allocation and `srun -n 1` start their ranks themselves.

    place = find_place(os.environ)      # None: start the ranks here
    if place is not None:
        os.environ.update(place.variables())
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moe_train.errors import TrainValueError

_FIRST_PORT = 15000
_NUM_PORTS = 15000  # below the ports that Linux gives to outgoing connections
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # batch scripts, interactive shells and the like
_HOST_GROUP = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_MPI = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank that another program has started.

    Attributes:
        started_by: `torchrun`, `srun` or `mpirun`.
        remedy: how that program is told another number of ranks; has a place for the number.
        local: rank and number of ranks on this machine; None where torchrun's variables say it.
        master: address and port at which rank 0 waits; None where the variables are set already.
    """

    started_by: str
    remedy: str
    rank: int
    world_size: int
    local: tuple[int, int] | None = None
    master: tuple[str, int] | None = None

    def variables(self) -> dict[str, str]:
        """What torch reads to join the ranks, where it is not set already."""
        found = {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size)}
        if self.local is not None:
            found |= {"LOCAL_RANK": str(self.local[0]), "LOCAL_WORLD_SIZE": str(self.local[1])}
        if self.master is not None:
            found |= {"MASTER_ADDR": self.master[0], "MASTER_PORT": str(self.master[1])}
        return found


def find_place(variables: Mapping[str, str]) -> RankPlace | None:
    """The rank that this process is; None where it was started alone.

    torchrun's variables count first, for it may run inside of srun; then those of mpirun, which
    starts its helpers by srun.

    Raises:
        ValueError: a variable cannot be read, or the address of rank 0 is not known.
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return _torchrun_place(variables)
    for names in _MPI:
        if all(name in variables for name in names):
            return _mpi_place(variables, names)
    return _slurm_place(variables)


def _torchrun_place(variables: Mapping[str, str]) -> RankPlace:
    rank, world_size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    if rank >= world_size:
        raise TrainValueError(
            f"the environment has RANK={rank} of WORLD_SIZE={world_size}; ranks count from 0"
        )
    if not variables.get("MASTER_ADDR") or "MASTER_PORT" not in variables:
        raise TrainValueError(
            "the environment has RANK and WORLD_SIZE, as of a rank that torchrun has started, and "
            "lacks MASTER_ADDR or MASTER_PORT; start ranks by torchrun, or unset RANK"
        )
    _number(variables, "MASTER_PORT")
    return RankPlace(
        started_by="torchrun",
        remedy="torchrun --nnodes=M --nproc-per-node=N with M * N = {}",
        rank=rank,
        world_size=world_size,
    )


def expand_hosts(text: str) -> list[str]:
    """The hosts of a SLURM list, in order: `node[01-03,07],gpu5` has five.

    Raises:
        ValueError: the list has no such form.
    """
    groups = _HOST_GROUP.findall(text.strip())
    if not groups or ",".join(groups) != text.strip():
        raise TrainValueError(
            f"cannot read the list of hosts {text!r}; set MASTER_ADDR to the host of rank 0"
        )
    return [host for group in groups for host in _expand(group)]


def _expand(group: str) -> Iterator[str]:
    """The hosts of `rack[1-2]n[01-04]`."""
    head, bracket, rest = group.partition("[")
    if not bracket:
        yield group
        return
    inside, _, tail = rest.partition("]")
    for part in inside.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise TrainValueError(
                f"cannot read the list of hosts {group!r}; set MASTER_ADDR to the host of rank 0"
            )
        for number in range(int(first), int(last or first) + 1):
            for end in _expand(tail):
                yield f"{head}{number:0{len(first)}d}{end}"


def _slurm_place(variables: Mapping[str, str]) -> RankPlace | None:
    """A task of a step that srun started; its variables also stand in shells and batch scripts."""
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= variables.keys() or "SLURM_PTY_PORT" in variables:
        return None
    step = _number(variables, "SLURM_STEP_ID")
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    world_size = _number(variables, size_name, 1)
    if step >= _FIRST_SPECIAL_STEP or world_size == 1:
        return None
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    job = _number(variables, "SLURM_JOB_ID", 0)
    return RankPlace(
        started_by="srun",
        remedy="srun -n {}",
        rank=_number(variables, "SLURM_PROCID"),
        world_size=world_size,
        local=(_number(variables, "SLURM_LOCALID", 0), _slurm_local_size(variables, world_size)),
        master=_master(variables, f"{job}.{step}", hosts),
    )


def _slurm_local_size(variables: Mapping[str, str], world_size: int) -> int:
    """Tasks on this machine, from `4(x2),3`: four on the first two machines, three on the next."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = _number(variables, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else world_size


def _mpi_place(variables: Mapping[str, str], names: tuple[str, ...]) -> RankPlace | None:
    rank, world_size, local_rank, local_size = (_number(variables, name) for name in names)
    if world_size == 1:
        return None
    if local_size < world_size and "MASTER_ADDR" not in variables:
        raise TrainValueError(
            "mpirun started ranks on several machines, and MASTER_ADDR is not set; give it the "
            "host of rank 0: mpirun -x MASTER_ADDR=host ..."
        )
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid", "")
    return RankPlace(
        started_by="mpirun",
        remedy="mpirun -n {}",
        rank=rank,
        world_size=world_size,
        local=(local_rank, local_size),
        master=_master(variables, job, ""),
    )


def _master(variables: Mapping[str, str], job: str, hosts: str) -> tuple[str, int]:
    """Where rank 0 waits: what is set, else the first host and a port that is the job's own."""
    address = variables.get("MASTER_ADDR", "")
    if not address:
        found = expand_hosts(hosts) if hosts else []
        # One machine needs no name that others can resolve.
        address = found[0] if len(found) > 1 else "127.0.0.1"
    port = _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
    return address, _number(variables, "MASTER_PORT", port)


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise TrainValueError(f"the environment has {name}={text!r}; expected a whole number")
    return int(text)
