"""Tiny configs and plans with unit-gain initialisation, so that every sub-layer matters."""

from dataclasses import replace
from typing import Any

from megatron_moe.config.attention import AttentionConfig, CoreAttentionConfig, NormConfig, RopeConfig
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.data import DataConfig, TokenizerConfig
from megatron_moe.config.logging import LoggingConfig
from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.model import InitConfig, LayerConfig, ModelConfig
from megatron_moe.config.moe import ExpertsConfig, MoEConfig, RouterConfig
from megatron_moe.config.optimizer import LRConfig, OptimizerConfig
from megatron_moe.config.parallel import ParallelConfig, ProcessInfo
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.run import KernelConfig, RunPlan
from megatron_moe.config.training import BatchConfig, LoopConfig

HIDDEN, VOCAB, SEQ = 32, 96, 32
SWIGLU = ActivationConfig(kind="silu", gated=True)
NORM = NormConfig(kind="RMSNorm")


def attention(**changes: Any) -> AttentionConfig:
    config = AttentionConfig(
        hidden_size=HIDDEN,
        num_heads=4,
        num_query_groups=2,
        head_dim=8,
        core=CoreAttentionConfig(softmax_scale=8**-0.5),
        rope=RopeConfig(dim=8),
        norm=NORM,
    )
    return replace(config, **changes)


def router(**changes: Any) -> RouterConfig:
    config = RouterConfig(hidden_size=HIDDEN, num_experts=8, topk=2, balancing=("aux_loss",), aux_loss_coeffs=(0.01,))
    return replace(config, **changes)


def moe(router_config: RouterConfig | None = None, **changes: Any) -> MoEConfig:
    router_config = router_config or router()
    experts = ExpertsConfig(
        num_experts=router_config.num_experts, hidden_size=HIDDEN, ffn_hidden_size=24, activation=SWIGLU
    )
    return replace(MoEConfig(router=router_config, experts=experts), **changes)


def model(*, num_layers: int = 3, moe_config: MoEConfig | None = None, **changes: Any) -> ModelConfig:
    """Model config with one dense layer, followed by MoE layers."""
    dense = MLPConfig(hidden_size=HIDDEN, ffn_hidden_size=48, activation=SWIGLU)
    feed_forwards = [dense] + [moe_config or moe()] * (num_layers - 1)
    layers = tuple(LayerConfig(mixer=attention(), feed_forward=f, norm=NORM) for f in feed_forwards)
    config = ModelConfig(
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        layers=layers,
        norm=NORM,
        position_embedding="rope",
        max_positions=SEQ,
        tied_embeddings=False,
        init=InitConfig(method="unit_gain"),
    )
    return replace(config, **changes)


def plan(**changes: Any) -> RunPlan:
    """fp64 plan on mock data: 8 sequences a step in microbatches of 2, clipping and weight decay on."""
    config = RunPlan(
        model=model(),
        parallel=ParallelConfig(),
        precision=PrecisionConfig(params="fp64", grads="fp64", main_params_dtype="fp64"),
        optimizer=OptimizerConfig(clip_grad=0.5),
        lr_schedule=LRConfig(max_lr=1e-2, decay_samples=800, start_weight_decay=0.1, end_weight_decay=0.1),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=8),
        data=DataConfig(
            mock_data=True,
            mock_documents=300,
            seq_length=SEQ,
            vocab_size=90,
            tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=90),
            split="90,10,0",
        ),
        loop=LoopConfig(train_iters=100),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(),
        kernels=KernelConfig(kernel_backend="reference"),
        process=ProcessInfo(),
        device="cpu",
    )
    return replace(config, **changes)
