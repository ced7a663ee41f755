"""Variables as srun, mpirun and torchrun set them; the command joins by them in test_srun.py."""

import pytest

from moe_train.errors import TrainValueError
from moe_train.rank.environment import expand_hosts, find_place

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "node[09-10]",
    "SLURM_JOB_NODELIST": "node[08-10]",
}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node08", "MASTER_PORT": "29500"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu5", ["gpu5"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("a,b-1,c.d", ["a", "b-1", "c.d"]),
        ("r[1-2]n[09-10]x", ["r1n09x", "r1n10x", "r2n09x", "r2n10x"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[5],m[3]", ["n5", "m3"]),
    ],
)
def test_hosts_of_a_list_come_in_order_and_keep_their_zeros(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "n[]", "n],m", "a,,b"])
def test_a_list_that_cannot_be_read_says_what_to_set(text: str) -> None:
    with pytest.raises(TrainValueError, match="set MASTER_ADDR to the host of rank 0"):
        expand_hosts(text)


def test_a_task_of_srun_is_a_rank() -> None:
    place = find_place(SRUN)
    assert place is not None
    variables = place.variables()
    port = int(variables.pop("MASTER_PORT"))
    assert variables == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "node09",
    }
    assert 15000 <= port < 30000
    other = find_place({**SRUN, "SLURM_STEP_ID": "1"})
    assert other is not None and other.variables()["MASTER_PORT"] != str(port)


def test_a_given_address_and_port_are_kept() -> None:
    place = find_place({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2345"})
    assert place is not None and place.master == ("10.0.0.1", 2345)


def test_tasks_of_one_machine_need_no_name_of_it() -> None:
    place = find_place({**SRUN, "SLURM_STEP_NODELIST": "node09", "SLURM_STEP_TASKS_PER_NODE": "7"})
    assert place is not None and place.master is not None and place.local == (1, 7)
    assert place.master[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},  # a batch script
        {"SLURM_STEP_ID": "4294967291"},  # the same, where SLURM numbers it
        {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # the shell of salloc
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun -n 1 in a larger allocation
        {"SLURM_PTY_PORT": "40001"},  # srun --pty bash
        {"SLURM_PROCID": None},
    ],
)
def test_what_srun_did_not_start_as_one_of_several_starts_its_ranks_itself(
    changes: dict[str, str | None],
) -> None:
    variables = {k: v for k, v in {**SRUN, **changes}.items() if v is not None}
    assert find_place(variables) is None


def test_an_empty_environment_is_no_rank() -> None:
    assert find_place({}) is None


def test_torchrun_counts_before_srun_and_keeps_its_variables() -> None:
    place = find_place({**SRUN, **TORCHRUN})
    assert place is not None and place.started_by == "torchrun"
    assert place.variables() == {"RANK": "2", "WORLD_SIZE": "4"}


def test_mpirun_counts_before_the_srun_that_starts_its_helpers() -> None:
    place = find_place({**SRUN, **OMPI, "PMIX_NAMESPACE": "prterun-1@1"})
    assert place is not None and place.started_by == "mpirun"
    assert (place.rank, place.world_size, place.local) == (3, 4, (3, 4))
    assert place.master is not None and place.master[0] == "127.0.0.1"
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    other = find_place(hydra)
    assert other is not None and (other.rank, other.world_size) == (1, 2)
    # What srun sets for programs that use PMI says nothing about the machine.
    pmi_of_srun = find_place({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "7"})
    assert pmi_of_srun is not None and pmi_of_srun.started_by == "srun"


def test_mpirun_over_machines_needs_an_address() -> None:
    several = {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    with pytest.raises(TrainValueError, match="mpirun -x MASTER_ADDR=host"):
        find_place(several)
    place = find_place({**several, "MASTER_ADDR": "n1"})
    assert place is not None and place.master is not None and place.master[0] == "n1"


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(TrainValueError, match="SLURM_PROCID='five'; expected a whole number"):
        find_place({**SRUN, "SLURM_PROCID": "five"})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"MASTER_ADDR": ""}, "lacks MASTER_ADDR or MASTER_PORT; start ranks by torchrun"),
        ({"MASTER_PORT": "first"}, "MASTER_PORT='first'; expected a whole number"),
        ({"RANK": "4"}, "RANK=4 of WORLD_SIZE=4; ranks count from 0"),
    ],
)
def test_what_torchrun_would_not_set_is_named(changed: dict[str, str], told: str) -> None:
    with pytest.raises(TrainValueError, match=told):
        find_place({**TORCHRUN, **changed})
