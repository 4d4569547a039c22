"""Context-parallel training steps equal those of one rank."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_moe.build import build_data, build_eval_loaders, build_model, build_train_loader
from megatron_moe.config.attention import AttentionConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.model import ModelConfig, MTPConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.config.training import LoopConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.evaluation import evaluate
from megatron_moe.train.pipeline_stage import Pipeline
from tests.helpers import tiny, tiny_data, tiny_models
from tests.helpers.ranks import on_threads
from tests.helpers.thinned import nightly_only
from tests.helpers.tolerances import FP64_LAYOUT
from tests.train.test_trainer import STEPS, train

KERNELS = reference.bundle()
CP2 = ParallelConfig(world_size=2, cp=2)
CP4 = ParallelConfig(world_size=4, cp=4)
LEVELS = ParallelConfig(world_size=4, cp=4, cp_sub_axes=(2, 2))
LOOPS = (tiny.plan().loop, replace(tiny.plan().loop, calculate_per_token_loss=True))


def windowed() -> AttentionConfig:
    core = replace(tiny.attention().core, window=(5, 0), sinks=True)
    return tiny.attention(core=core, qk_norm="per_head", output_gate=True)


MIXERS = {"gqa": tiny.attention(), "mla": tiny_models.mla_config(num_heads=4), "window and sinks": windowed()}


def model(mixer: AttentionConfig | MLAConfig, exchange: Any, **changes: Any) -> ModelConfig:
    """Model with a dense layer and two MoE layers with balancing losses."""
    config = tiny.model(**{"vocab_size": 104, **changes})
    mixer = replace(mixer, core=replace(mixer.core, context_exchange=exchange))
    return replace(config, layers=tuple(replace(layer, mixer=mixer) for layer in config.layers))


def check(plan: RunPlan, parallel: ParallelConfig, *, only: tuple[str, ...] = ("",)) -> None:
    """Compares losses, norms, metrics and weights of three steps; `only`: prefixes of their names."""

    def figures(context: ParallelContext) -> dict[str, torch.Tensor]:
        return {name: value for name, value in train(plan, context).items() if name.startswith(only)}

    single = figures(ParallelContext.single())
    for result in on_threads(parallel, figures):
        FP64_LAYOUT.check_all(result, single, f"cp {parallel.cp}")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    """Plan with short documents from a small file."""
    folder = tmp_path_factory.mktemp("corpus")
    data = replace(
        tiny.plan().data,
        mock_data=False,
        train_data_path=(tiny_data.corpus(folder),),
        valid_data_path=(tiny_data.corpus(folder, name="valid", seed=5),),
        vocab_size=tiny_data.VOCAB,
        tokenizer=tiny_data.data_config().tokenizer,
    )
    return tiny.plan(data=data, model=model(tiny.attention(), "p2p"))


def packed(plan: RunPlan) -> RunPlan:
    """Plan with positions and attention reset at documents, and end-of-document tokens masked in the loss."""
    data = replace(plan.data, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    return replace(plan, data=data)


@pytest.mark.parametrize(
    ("exchange", "mixer", "parallel"),
    [
        pytest.param("p2p", "mla", CP4, marks=pytest.mark.slow),
        ("allgather", "gqa", CP2),
        pytest.param("a2a", "window and sinks", CP4, marks=pytest.mark.slow),
        ("a2a+p2p", "gqa", LEVELS),
    ],
)
def test_context_parallel_steps_equal_one_rank(
    plan: RunPlan, exchange: str, mixer: str, parallel: ParallelConfig
) -> None:
    check(replace(plan, model=model(MIXERS[mixer], exchange)), parallel)


@pytest.mark.parametrize("mtp", [None, MTPConfig(num_layers=2)], ids=["", "multi-token prediction"])
@pytest.mark.parametrize("loop", LOOPS, ids=["per microbatch", "per token"])
def test_packed_documents_equal_one_rank(plan: RunPlan, loop: LoopConfig, mtp: MTPConfig | None) -> None:
    """Each rank's part of a sequence is weighted by its number of tokens, also if microbatches have equal weights."""
    check(replace(packed(plan), model=model(tiny.attention(), "p2p", mtp=mtp), loop=loop), CP2)


@pytest.mark.slow
def test_dynamic_context_parallel_degree_equals_one_rank(plan: RunPlan) -> None:
    """The degree of a microbatch depends on its document lengths."""
    dynamic, plan = replace(CP2, max_seqlen_per_dp_cp_rank=24), packed(plan)

    def degrees(context: ParallelContext) -> set[int]:
        loader = build_train_loader(plan, context, build_data(plan, context))
        return {len(batch.context.tokens.part.of_ranks) for _ in range(STEPS) for batch in loader.next_step()}

    assert on_threads(dynamic, degrees) == [{1, 2}, {1, 2}]
    check(plan, dynamic)


@pytest.mark.slow
def test_context_and_data_parallel_equal_one_rank(plan: RunPlan) -> None:
    check(plan, ParallelConfig(world_size=4, cp=2))


@pytest.mark.parametrize("loop", nightly_only(LOOPS, LOOPS[:1]), ids=["per microbatch", "per token"])
def test_expert_parallel_over_context_parallel_ranks_equals_one_rank(plan: RunPlan, loop: LoopConfig) -> None:
    """Experts are sharded over the context-parallel ranks, so only losses, norms and metrics are compared."""
    config = model(tiny.attention(), "allgather", moe_config=tiny.moe(dispatcher="alltoall"))
    figures = ("loss", "norm", "load_balancing_loss")
    check(replace(plan, model=config, loop=loop), ParallelConfig(world_size=2, cp=2, ep=2), only=figures)


def test_context_parallel_evaluation_equals_one_rank(plan: RunPlan) -> None:
    plan = replace(packed(plan), loop=replace(plan.loop, eval_iters=2))

    def loss(context: ParallelContext) -> float:
        valid, _ = build_eval_loaders(plan, context, build_data(plan, context))
        pipeline = Pipeline(plan.pipeline, plan.layout, context, build_model(plan, context, KERNELS))
        return evaluate(pipeline, valid["validation"].steps())

    single = loss(ParallelContext.single())
    for parallel in (CP4, ParallelConfig(world_size=4, cp=2)):
        FP64_LAYOUT.check(torch.tensor(on_threads(parallel, loss)), torch.full((4,), single).double())
