"""Flags of the token dispatchers determine the dispatcher config of MoE layers."""

import pytest

from megatron_moe.config.echo import EchoConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.transport import ECHO, HybridEPConfig, PushConfig
from tests.helpers.command_lines import plan_of


def experts_of(more: str) -> MoEConfig:
    return plan_of(more).model.layers[1].feed_forward


@pytest.mark.parametrize(
    ("more", "hosts", "expected"),
    [
        ("", 1, "symmetric"),
        ("", 2, "symmetric"),
        ("", 4, "hierarchical"),
        ("--moe-alltoall-backend nccl", 4, "nccl"),
        ("--moe-alltoall-backend nccl", 1, "nccl"),
        ("--device cpu", 1, "nccl"),
        ("--fp64", 1, "nccl"),
        ("--moe-router-load-balancing-type expert_choice --moe-aux-loss-coeff 0", 1, "nccl"),
        ("--moe-token-dispatcher-type allgather", 1, "allgather"),
    ],
)
def test_alltoall_uses_symmetric_memory_if_the_plan_has_its_ranks_on_one_host(more, hosts, expected):
    """The plan has EP 4, with the eight ranks of the run on one, two or four hosts."""
    words = f"--expert-model-parallel-size 4 --global-batch-size 32 --moe-token-dispatcher-type alltoall {more}"
    environ = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": f"{8 // hosts}"}
    plan = plan_of(words, environ=environ)
    assert plan.model.layers[1].feed_forward.transport(plan.parallel).name == expected


def test_flags_of_expert_clones():
    base = "--expert-model-parallel-size 4 --global-batch-size 32 --moe-token-dispatcher-type alltoall"
    flags = "--moe-enable-echo --moe-num-echo-experts 8"
    environ = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    plan = plan_of(f"{base} {flags}", environ=environ)
    config = plan.model.layers[1].feed_forward
    assert config.echo == EchoConfig(moe_num_echo_experts=8) and config.transport(plan.parallel) is ECHO
    options = "--moe-echo-expert-dispatch-overlap --moe-echo-recompute-expert-dispatch"
    plan = plan_of(f"{base} {flags} {options}", environ=environ)
    echo = EchoConfig(
        moe_num_echo_experts=8, moe_echo_expert_dispatch_overlap=True, moe_echo_recompute_expert_dispatch=True
    )
    assert plan.model.layers[1].feed_forward.echo == echo


def test_flags_of_the_flex_dispatcher():
    config = experts_of("")
    assert config.expert_rank_capacity_factor == 1.25
    assert config.hybridep == HybridEPConfig(num_sms_preprocessing=108) and config.push == PushConfig()
    flags = (
        "--moe-permute-fusion-into-hybridep --moe-hybridep-num-blocks-permute 5 --moe-hybridep-num-blocks-unpermute 6 "
        "--moe-hybridep-num-sms-preprocessing 7 --moe-expert-rank-capacity-factor 1.5 --moe-flex-dispatcher-num-sms 8"
    )
    config = experts_of(f"{flags} --moe-token-dispatcher-type flex")
    assert config.expert_rank_capacity_factor == 1.5
    assert config.hybridep == HybridEPConfig(
        num_sms=8, fuse_permute=True, num_blocks_permute=5, num_blocks_unpermute=6, num_sms_preprocessing=7
    )
    assert config.push == PushConfig(num_sms=8)
