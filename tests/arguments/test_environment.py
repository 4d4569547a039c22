"""Environment variables that flags require: values, reasons, and precedence over variables that are already set."""

import pytest

from arguments.environment import FROM_A_FILE
from arguments.errors import FlagErrors
from tests.helpers.command_lines import plan_of

EP2 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
SPREAD = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"


def environment_of(more: str = "", environ: dict[str, str] | None = None) -> dict[str, str]:
    return dict(plan_of(more, environ=environ).environment)


def test_a_plain_run_sets_no_environment_variables():
    assert environment_of() == {}


def test_deterministic_mode_sets_library_variables():
    assert environment_of("--deterministic-mode") == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "^NVLS",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }
    assert environment_of("--deterministic-mode --device cpu") == {}


def test_overlap_of_expert_communication_sets_the_number_of_queues():
    assert environment_of("--overlap-moe-expert-parallel-comm") == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def test_changing_row_counts_enable_expandable_segments():
    growing = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert environment_of(f"{SPREAD} --moe-alltoall-backend nccl", EP2) == growing
    flex = SPREAD.replace("alltoall", "flex")
    assert environment_of(flex, EP2) == environment_of(f"{flex} --moe-flex-dispatcher-backend deepep", EP2)
    assert (
        environment_of(flex, EP2) == environment_of(SPREAD, EP2) == {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", **growing}
    )
    graphs = environment_of(f"{SPREAD} --cuda-graph-impl local {NO_DROPOUT}", EP2)
    assert graphs["NCCL_GRAPH_REGISTER"] == "0"


def test_each_variable_has_a_reason_that_names_its_flag():
    plan = plan_of(f"{SPREAD} --deterministic-mode --overlap-moe-expert-parallel-comm", environ=EP2)
    assert len(plan.environment) == len(plan.environment_reasons) == 6
    assert all(reason.startswith("--") for reason in plan.environment_reasons)
    assert [note for note in plan.notes if note.startswith("environment: ")] == [
        f"environment: {name}={value} ({reason})"
        for (name, value), reason in zip(plan.environment, plan.environment_reasons, strict=True)
    ]


def test_variables_that_are_set_are_kept_and_differences_noted():
    plan = plan_of("--deterministic-mode", environ={"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "^NVLS"})
    assert dict(plan.environment) == {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    notes = [note for note in plan.notes if "is kept" in note]
    assert len(notes) == 1 and notes[0].startswith("environment: CUBLAS_WORKSPACE_CONFIG=:16:8 is kept")
    assert "would have set :4096:8 (--deterministic-mode" in notes[0]


def test_variables_that_change_recipes_of_transformer_engine_are_rejected():
    """The variables would select a precision that is not implemented here. Their default 0 is accepted."""
    fp8 = "--bf16 --fp8-format e4m3 --fp8-recipe blockwise"
    changed = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    with pytest.raises(FlagErrors, match="NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1, which changes recipes"):
        plan_of(fp8, environ=changed)
    plan_of(fp8, environ={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"})
    plan_of("--bf16", environ=changed)


def test_variables_of_a_file_override_those_of_flags(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("environment: {CUDA_DEVICE_MAX_CONNECTIONS: 8, NCCL_A: 1}\n", encoding="utf-8")
    plan = plan_of(f"--overlap-moe-expert-parallel-comm --config {path}")
    assert dict(plan.environment) == {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_A": "1"}
    assert plan.environment_reasons == (FROM_A_FILE, FROM_A_FILE)
