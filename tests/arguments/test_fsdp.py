"""Flags of fully sharded data parallelism and the configurations that they select."""

from dataclasses import replace

import pytest

from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.parallel import DataParallelConfig
from tests.helpers.command_lines import plan_of

FOUR_RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
ZERO_3 = FSDPConfig(gathers_from_peers=True, reduces_through_peers=True)
SHARDED = DataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, fsdp=ZERO_3)
WHOLE = "--cuda-graph-impl full_iteration"
STRATEGY = "--data-parallel-sharding-strategy"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{STRATEGY} no_shard", DataParallelConfig()),
        (f"{STRATEGY} optim", DataParallelConfig(use_distributed_optimizer=True)),
        (f"{STRATEGY} optim_grads", replace(SHARDED, fsdp=replace(ZERO_3, shards_weights=False))),
        (f"{STRATEGY} optim_grads_params", SHARDED),
        ("", SHARDED),
    ],
)
def test_a_strategy_selects_what_is_sharded(flags: str, expected: DataParallelConfig) -> None:
    plan = plan_of(f"--use-megatron-fsdp {flags}", environ=FOUR_RANKS)
    assert plan.data_parallel == expected
    assert plan.parallel.num_distributed_optimizer_instances == 1


@pytest.mark.parametrize(
    ("flags", "expected", "instances"),
    [
        ("--num-distributed-optimizer-instances 2", {}, 2),
        (
            "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
            {"outer_dp_sharding_strategy": "optim"},
            2,
        ),
        ("--fsdp-double-buffer", {"fsdp_double_buffer": True}, 1),
        (f"{WHOLE} --attention-dropout 0 --hidden-dropout 0", {"fsdp_double_buffer": True}, 1),
        ("--fsdp-gather-backend nccl", {"gathers_from_peers": False}, 1),
        ("--fsdp-reduce-backend nccl", {"reduces_through_peers": False}, 1),
        ("--device cpu", {"gathers_from_peers": False, "reduces_through_peers": False}, 1),
        ("--bf16 --megatron-fsdp-grad-comm-dtype bf16", {"grad_comm": "bf16"}, 1),
        ("--bf16 --megatron-fsdp-grad-comm-dtype fp32", {"grad_comm": "fp32"}, 1),
        ("--bf16 --megatron-fsdp-grad-comm-dtype auto", {}, 1),
    ],
)
def test_flags_select_replicas_buffers_backends_and_formats(
    flags: str, expected: dict[str, object], instances: int
) -> None:
    plan = plan_of(f"--use-megatron-fsdp {flags}", environ=FOUR_RANKS)
    assert plan.data_parallel.fsdp == replace(ZERO_3, **expected)
    assert plan.parallel.num_distributed_optimizer_instances == instances


@pytest.mark.parametrize(
    ("flags", "main_params", "grads"),
    [
        ("", "fp32", "fp32"),
        ("--main-params-dtype fp16 --use-precision-aware-optimizer", "fp16", "fp32"),
        ("--megatron-fsdp-main-params-dtype fp16 --use-precision-aware-optimizer", "fp16", "fp32"),
        (
            "--main-params-dtype fp16 --megatron-fsdp-main-params-dtype fp32 --use-precision-aware-optimizer",
            "fp32",
            "fp32",
        ),
        ("--megatron-fsdp-main-grads-dtype bf16", "fp32", "bf16"),
        ("--grad-reduce-in-bf16", "fp32", "bf16"),
        ("--grad-reduce-in-bf16 --megatron-fsdp-main-grads-dtype fp32", "fp32", "fp32"),
    ],
)
def test_dtypes_of_master_weights_and_gradients(flags: str, main_params: str, grads: str) -> None:
    precision = plan_of(f"--use-megatron-fsdp --bf16 {flags}", environ=FOUR_RANKS).precision
    assert (precision.main_params_dtype, precision.grads) == (main_params, grads)
