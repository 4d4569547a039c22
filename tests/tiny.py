"""Tiny specs and plans with unit-gain initial values, so that every sub-layer matters. No test builds one by hand."""

from dataclasses import replace
from typing import Any

from megatron_moe.specs.attention import AttentionSpec, CoreAttentionSpec, NormSpec, RopeSpec
from megatron_moe.specs.model import InitSpec, LayerSpec, ModelSpec
from megatron_moe.specs.moe import ActivationSpec, ExpertsSpec, MLPSpec, MoESpec, RouterSpec
from megatron_moe.specs.parallel import Launch, ParallelSpec
from megatron_moe.specs.precision import PrecisionSpec
from megatron_moe.specs.run import KernelSpec, RunPlan
from megatron_moe.specs.train import (
    BatchSpec,
    CheckpointSpec,
    DataSpec,
    LoggingSpec,
    LoopSpec,
    LRSpec,
    OptimizerSpec,
    TokenizerSpec,
)

HIDDEN, VOCAB, SEQ = 32, 96, 32
SWIGLU = ActivationSpec(kind="silu", gated=True)
NORM = NormSpec(kind="RMSNorm")


def attention(**changes: Any) -> AttentionSpec:
    spec = AttentionSpec(
        hidden_size=HIDDEN,
        num_heads=4,
        num_query_groups=2,
        head_dim=8,
        core=CoreAttentionSpec(softmax_scale=8**-0.5),
        rope=RopeSpec(dim=8),
        norm=NORM,
    )
    return replace(spec, **changes)


def router(**changes: Any) -> RouterSpec:
    spec = RouterSpec(hidden_size=HIDDEN, num_experts=8, topk=2, balancing=("aux_loss",), aux_loss_coeffs=(0.01,))
    return replace(spec, **changes)


def moe(router_spec: RouterSpec | None = None, **changes: Any) -> MoESpec:
    router_spec = router_spec or router()
    experts = ExpertsSpec(
        num_experts=router_spec.num_experts, hidden_size=HIDDEN, ffn_hidden_size=24, activation=SWIGLU
    )
    return replace(MoESpec(router=router_spec, experts=experts), **changes)


def model(*, num_layers: int = 3, moe_spec: MoESpec | None = None, **changes: Any) -> ModelSpec:
    """One dense layer, then MoE layers."""
    dense = MLPSpec(hidden_size=HIDDEN, ffn_hidden_size=48, activation=SWIGLU)
    feed_forwards = [dense] + [moe_spec or moe()] * (num_layers - 1)
    layers = tuple(LayerSpec(mixer=attention(), feed_forward=f, norm=NORM) for f in feed_forwards)
    spec = ModelSpec(
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        layers=layers,
        norm=NORM,
        position_embedding="rope",
        max_positions=SEQ,
        tied_embeddings=False,
        init=InitSpec(method="unit_gain"),
    )
    return replace(spec, **changes)


def plan(**changes: Any) -> RunPlan:
    """fp64 on mock data: 8 sequences a step in microbatches of 2, clipping and weight decay on."""
    spec = RunPlan(
        model=model(),
        parallel=ParallelSpec(),
        precision=PrecisionSpec(params="fp64", grads="fp64", master="fp64"),
        optimizer=OptimizerSpec(clip_grad=0.5),
        lr=LRSpec(max_lr=1e-2, decay_samples=800, start_weight_decay=0.1, end_weight_decay=0.1),
        batch=BatchSpec(micro=2, global_size=8),
        data=DataSpec(
            mock=True,
            mock_documents=300,
            seq_length=SEQ,
            vocab_size=90,
            tokenizer=TokenizerSpec(kind="NullTokenizer", vocab_size=90),
            split="90,10,0",
        ),
        loop=LoopSpec(train_iters=100),
        checkpoint=CheckpointSpec(),
        logging=LoggingSpec(),
        kernels=KernelSpec(backend="reference"),
        launch=Launch(),
        device="cpu",
    )
    return replace(spec, **changes)
