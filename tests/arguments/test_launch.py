"""Ranks and addresses from the environment variables of launchers."""

import pytest

from arguments.errors import FlagErrors
from arguments.launch import allocation_note, environ_of_rank_0, launch_of, other_ranks
from megatron_moe.api import read_flags
from megatron_moe.config.parallel import ProcessInfo
from tests.helpers.check_cases import EIGHT_RANKS
from tests.helpers.command_lines import SMALL, plan_of, problems_of, texts_of, words
from tools.verify_layout import layout_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_NODELIST": "node[007-008]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "head",
}
BATCH_SHELL = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}
"""SLURM variables of a shell within an allocation, outside srun."""


def test_without_a_launcher_there_is_one_process():
    assert launch_of({}) == ProcessInfo()
    assert launch_of({"MASTER_PORT": "5"}).master_port == 5


def test_a_world_size_without_a_rank_is_rejected():
    with pytest.raises(FlagErrors, match="WORLD_SIZE=8, but RANK is not set") as caught:
        launch_of({"WORLD_SIZE": "8"})
    (problem,) = caught.value.problems
    assert "unset WORLD_SIZE" in problem.remedy and "set RANK" in problem.remedy
    assert launch_of({"WORLD_SIZE": "1"}) == ProcessInfo()
    assert launch_of({"WORLD_SIZE": "8", **SRUN}).launcher == "slurm"
    assert launch_of({"WORLD_SIZE": "8", **MPIRUN}).launcher == "openmpi"


def test_ranks_and_master_are_read_from_torchrun():
    assert launch_of(TORCHRUN) == ProcessInfo(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_addr="node7",
        master_port=1234,
        launcher="torchrun",
        supervised=True,
        start_id="x.2",
    )


def test_a_shell_that_sets_the_variables_may_end_before_the_ranks():
    by_hand = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    assert not launch_of(by_hand).supervised and not launch_of({}).supervised


@pytest.mark.parametrize("port", ["-1", "70000"])
def test_an_invalid_port_is_rejected(port):
    with pytest.raises(FlagErrors, match=f"MASTER_PORT={port} is not a port"):
        launch_of({"MASTER_PORT": port})


def test_ranks_are_read_from_srun_and_the_first_host_is_the_master():
    assert launch_of(SRUN) == ProcessInfo(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_addr="node007",
        master_port=20000 + 123456 % 20000,
        launcher="slurm",
        supervised=True,
        start_id="123456.0",
    )
    assert launch_of({**SRUN, "MASTER_ADDR": "me", "MASTER_PORT": "7"}).master_port == 7


def test_srun_without_the_number_of_tasks_per_node():
    environ = {name: value for name, value in SRUN.items() if name != "SLURM_NTASKS_PER_NODE"}
    assert launch_of({**environ, "SLURM_TASKS_PER_NODE": "4(x2)"}).local_world_size == 4
    with pytest.raises(FlagErrors, match="SLURM_NTASKS_PER_NODE"):
        launch_of(environ)


def test_a_step_on_some_of_the_jobs_hosts_has_its_own_master_and_size():
    step = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "node008",
        "SLURM_STEP_TASKS_PER_NODE": "4",
        "SLURM_PROCID": "1",
    }
    launch = launch_of({**SRUN, **step})
    assert (launch.master_addr, launch.world_size, launch.local_world_size) == ("node008", 4, 4)


@pytest.mark.parametrize(("place", "ranks"), [(0, 4), (1, 4), (2, 3)])
def test_hosts_with_different_numbers_of_tasks(place, ranks):
    uneven = {"SLURM_NTASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": str(place)}
    assert launch_of({**SRUN, **uneven}).local_world_size == ranks


def test_an_invalid_slurm_node_count_is_rejected():
    with pytest.raises(FlagErrors, match=r"SLURM_NODEID=2, but SLURM lists tasks of 2 hosts: 4\(x2\)"):
        launch_of({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "2"})


def test_the_host_list_variable_of_old_slurm_is_read():
    environ = {name: value for name, value in SRUN.items() if name != "SLURM_JOB_NODELIST"}
    assert launch_of({**environ, "SLURM_NODELIST": "a[1-2]"}).master_addr == "a1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("one", "one"),
        ("a1,b2", "a1"),
        ("node[003-010,012],other5", "node003"),
        ("gpu[7,9]-ib", "gpu7-ib"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("a-b[01-02]", "a-b01"),
    ],
)
def test_the_first_host_of_a_slurm_list_is_the_master(nodes, first):
    assert launch_of({**SRUN, "SLURM_JOB_NODELIST": nodes}).master_addr == first


def test_ranks_are_read_from_mpirun_which_needs_a_master_on_several_hosts():
    assert launch_of(MPIRUN) == ProcessInfo(
        rank=3, world_size=4, local_rank=1, local_world_size=2, master_addr="head", launcher="openmpi", supervised=True
    )
    alone = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    del alone["MASTER_ADDR"]
    assert launch_of(alone).master_addr == "127.0.0.1"
    with pytest.raises(FlagErrors, match="MASTER_ADDR is not set"):
        launch_of({**alone, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


@pytest.mark.parametrize(
    "shell", [{"ENVIRONMENT": "BATCH"}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290"}]
)
def test_plain_python_in_an_allocation_is_one_process_with_a_note(shell):
    environ = {**BATCH_SHELL, **shell}
    assert launch_of(environ) == ProcessInfo()
    assert "16 tasks" in (allocation_note(environ) or "")
    assert any("not started by srun" in note for note in plan_of(environ=environ).notes)


def test_an_allocation_without_tasks_is_not_a_launcher():
    environ = {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "16"}
    assert launch_of(environ) == ProcessInfo()
    assert allocation_note({**SRUN}) is None


def test_srun_variables_are_sufficient():
    environ = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert launch_of(environ).launcher == "slurm"


def test_torchrun_under_srun_is_torchrun():
    assert launch_of({**SRUN, **TORCHRUN}).launcher == "torchrun"


def test_variables_set_by_hand_must_agree_with_srun():
    by_hand = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert launch_of({**SRUN, **by_hand}).rank == 5
    with pytest.raises(FlagErrors, match="WORLD_SIZE=16, but SLURM_NTASKS=8"):
        launch_of({**SRUN, **by_hand, "WORLD_SIZE": "16"})
    with pytest.raises(FlagErrors, match="RANK=4, but SLURM_PROCID=5"):
        launch_of({**SRUN, **by_hand, "RANK": "4"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({**TORCHRUN, "RANK": "x"}, "RANK is 'x', which is not an integer"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 does not exist in a world of 8 ranks"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 does not exist on a host with 4 ranks"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "9 ranks per host exceed the world size of 8"),
        ({**SRUN, "SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST"),
    ],
)
def test_an_invalid_environment_is_rejected(environ, message):
    with pytest.raises(FlagErrors, match=message):
        launch_of(environ)


def test_one_rank_needs_no_local_variables():
    assert launch_of({"RANK": "0", "WORLD_SIZE": "1"}).launcher == "torchrun"


def test_a_bad_launch_is_reported_with_the_other_problems():
    texts = texts_of("--no-such-flag", environ={"RANK": "0"})
    assert [text.split(" ")[0] for text in texts] == ["--no-such-flag", "the"]


def test_ranks_become_data_parallel_ranks():
    plan = plan_of("--micro-batch-size 2", environ=TORCHRUN)
    assert (plan.parallel.dp, plan.parallel.edp, plan.process.rank) == (8, 8, 5)
    assert plan.parallel.order == "tp-cp-ep-dp-pp"
    assert plan_of("--use-tp-pp-dp-mapping").parallel.order == "tp-cp-ep-pp-dp"


def test_a_non_numeric_step_is_not_a_special_step():
    assert launch_of({**SRUN, "SLURM_STEP_ID": "²"}).launcher == "slurm"


@pytest.mark.parametrize(("environ", "teller"), [({}, "no launcher"), (EIGHT_RANKS, "torchrun")])
def test_rank_problem_names_the_origin_of_the_world_size(environ, teller):
    (fold,) = [
        text for text in problems_of("--expert-model-parallel-size 16", environ=environ) if "folded" in text.what
    ]
    assert ("ranks", environ.get("WORLD_SIZE", "1"), teller) in fold.given


def test_a_run_planned_for_some_ranks_is_not_started_on_others():
    started = launch_of(TORCHRUN)
    for planned, launch in (
        ((None, None, None), ProcessInfo()),
        ((1, 1, 1), ProcessInfo()),
        ((8, None, None), started),
    ):
        assert list(other_ranks(*planned, launch)) == []
    (problem,) = other_ranks(16, None, None, started)
    assert problem.what == "--world-size 16, but this run was started with 8 ranks"
    (problem,) = other_ranks(None, 2, None, ProcessInfo())
    assert problem.what == "--nodes 2, but this run was started with 1 node"
    (problem,) = other_ranks(None, None, 8, ProcessInfo())
    assert problem.what == "--gpus-per-node 8, but this run was started with 1 local rank"


def test_the_plan_of_other_ranks_does_not_depend_on_the_own_srun(monkeypatch):
    """Tools are started by srun too, or in a shell that it started."""
    shell = {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"}
    launch = launch_of(environ_of_rank_0(shell, 64))
    assert (launch.rank, launch.world_size, launch.launcher) == (0, 64, "torchrun")
    assert layout_of(["--recipe", "quickstart", "--nproc", "2"], shell).parallel.world_size == 2
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    flags = words(SMALL, "--tokenizer-type --tokenizer-model")
    assert (
        read_flags([*flags, "--tokenizer-type", "ByteTokenizer", "--pipeline-model-parallel-size", "2"]).layout.pp == 2
    )
