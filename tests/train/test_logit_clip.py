"""QK-clip and the largest attention logits: scaling of the weights, constructed logits, layouts."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import AttentionConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.optimizer import OptimizerConfig, QKClipConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.model.attention import Attention
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.logit_clip import LogitClip
from megatron_moe.train.train_state import TrainState
from tests.helpers.example_proofs import check_layout
from tests.helpers.mixers import make, run
from tests.helpers.optim_parameters import FP64, set_grads
from tests.helpers.pipelines import make_trainer, run_steps
from tests.helpers.tiny_models import HIDDEN, attention_config, make_mb, mla_config, randn
from tests.helpers.tolerances import FP64_REF
from tests.parity.cells import plan_of
from tests.parity.dimensions import cell_of

YES = torch.ones((), dtype=torch.bool)
CASES = {
    "gqa": attention_config(),
    "biases": attention_config(qkv_bias=True),
    "gate": attention_config(output_gate=True),
    "window": attention_config(core={"window": (2, 0)}),
    "mla": mla_config(),
    "mla without q latent": mla_config(q_lora_rank=None),
}


def largest(module: Attention, x: Tensor) -> Tensor:
    """Largest logit of each head in one forward."""
    assert module.max_logits is not None
    module.max_logits.fill_(-math.inf)
    out = run(module, x, make_mb(2, len(x)))
    assert out.isfinite().all()
    return module.max_logits.clone()


def clipped(module: Attention, clip: LogitClip) -> None:
    """Applies the factors of a step whose learning rate is 0, on flat buffers."""
    context = ParallelContext.single(dtype=torch.float64)
    named = [(f"decoder.layers.0.self_attention.{name}", p) for name, p in module.named_parameters()]
    buffers = GradBuffers(named, FP64, context, reference.bundle(), optimizer=OptimizerConfig(clip_grad=0.0))
    optimizer = Optimizer(buffers, FP64)
    set_grads(buffers, {name: torch.zeros_like(p) for name, p in named})
    factors = clip.end_step(YES, MetricAccumulator())
    one = torch.ones((), dtype=torch.float64)
    optimizer.step(lr=0.0, weight_decay=0.0, grad_scale=one, apply_update=YES, row_factors=factors)


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_logits_of_twice_the_threshold_shrink_to_it(config: AttentionConfig | MLAConfig) -> None:
    module, x = make(config), randn(12, 2, HIDDEN)
    outputs = run(module, x, make_mb(2, 12))
    LogitClip(module, module.ctx, None, log=True)
    before = largest(module, x)
    FP64_REF.check(run(module, x, make_mb(2, 12)), outputs, "output while logits are tracked")
    threshold = float(before.max()) / 2
    clip = LogitClip(module, module.ctx, QKClipConfig(qk_clip_threshold=threshold, qk_clip_alpha=0.3), log=True)
    largest(module, x)
    clipped(module, clip)
    after = largest(module, x)
    if isinstance(config, MLAConfig):
        expected = before.clamp(max=threshold)
    else:  # the heads of a group share a key
        groups = before.view(module.num_groups, -1)
        eta = (threshold / groups.amax(dim=1, keepdim=True)).clamp(max=1)
        expected = (groups * eta).flatten()
    torch.testing.assert_close(after, expected, rtol=1e-9, atol=0)
    assert float(after.max()) == pytest.approx(threshold)


def test_every_row_of_a_query_group_has_its_factor() -> None:
    config = attention_config(output_gate=True)
    module, alpha = make(config), 0.25
    eta = torch.linspace(0.1, 1.0, config.num_heads, dtype=torch.float64)
    per_group, width = config.num_heads // config.num_query_groups, config.head_dim
    eta[per_group:] = eta[per_group:].flip(0)  # the smallest is of the first head of one group, and the last of others
    ((weight, rows),) = module.logit_factors(eta, alpha)
    assert weight is module.linear_qkv.weight
    for group, part in enumerate(rows.view(config.num_query_groups, -1)):
        least = eta[group * per_group : (group + 1) * per_group].min()
        q, gate, k, v = part.split([per_group * width, per_group * width, width, width])
        assert (q == least**alpha).all() and (k == least ** (1 - alpha)).all() and (gate == 1).all() and (v == 1).all()


@pytest.mark.parametrize("q_rank", [None, 12])
def test_the_rotated_part_of_latent_attention_gets_the_whole_factor_in_q(q_rank: int | None) -> None:
    config = mla_config(q_lora_rank=q_rank)
    module, alpha = make(config), 0.25
    eta = torch.linspace(0.1, 1.0, config.num_heads, dtype=torch.float64)
    (of_q, q_rows), (of_k, k_rows) = module.logit_factors(eta, alpha)
    assert of_q is (module.linear_q_proj if q_rank is None else module.linear_q_up_proj).weight
    assert of_k is module.linear_kv_up_proj.weight
    for head, (q, k) in enumerate(zip(q_rows.chunk(config.num_heads), k_rows.chunk(config.num_heads), strict=True)):
        nope, rope = q.split([config.qk_head_dim, config.qk_rope_dim])
        key, value = k.split([config.qk_head_dim, config.v_head_dim])
        assert (nope == eta[head] ** alpha).all() and (rope == eta[head]).all()
        assert (key == eta[head] ** (1 - alpha)).all() and (value == 1).all()


def test_rejected_steps_and_infinite_logits_leave_the_weights() -> None:
    module = make(mla_config())
    clip = LogitClip(module, module.ctx, QKClipConfig(qk_clip_threshold=1.0), log=False)
    cases = (YES, 4.0, True), (~YES, 4.0, False), (YES, math.inf, False), (YES, 0.5, False)
    for apply_update, logit, changes in cases:
        module.max_logits.fill_(logit)
        factors = clip.end_step(apply_update, MetricAccumulator())
        assert any((rows != 1).any() for rows in factors.values()) == changes
        assert (module.max_logits == -math.inf).all(), "the maxima are reset"


def test_evaluation_records_no_logits() -> None:
    module = make(mla_config())
    LogitClip(module, module.ctx, None, log=True)
    run(module, randn(5, 2, HIDDEN), make_mb(2, 5, training=False))
    assert (module.max_logits == -math.inf).all()


LAYOUTS = (
    "tp=2 sp=on dp=2 ep=2 zero=on dispatcher=alltoall attention=mla",
    "tp=2 sp=on cp=2 zero=on recompute=full",
    "cp=2 cpcomm=a2a attention=mla pp=2 accumulation=2",
    "cp=4 cpcomm=a2a+p2p documents=packed",
    "dp=2 cp=2 cpcomm=allgather sinks=on",
)


def plan(layout: str, *, overlapped: bool = False) -> RunPlan:
    """A plan in which every step clips some heads."""
    plan = plan_of(cell_of(f"balance=none {layout}"))
    clip = QKClipConfig(qk_clip_threshold=0.02)
    return replace(plan, optimizer=replace(plan.optimizer, qk_clip=clip, overlap_optimizer_step=overlapped))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_rank(layout: str) -> None:
    check_layout(plan(layout))


def test_the_overlapped_step_equals_one_rank() -> None:
    check_layout(plan("dp=2 zero=on", overlapped=True))


def test_training_clips_and_logs_the_largest_logit() -> None:
    found = []
    for threshold in (0.02, 1e6):
        base = plan("attention=mla")
        optimizer = replace(base.optimizer, qk_clip=QKClipConfig(qk_clip_threshold=threshold))
        logging = replace(base.logging, log_max_attention_logit=True)
        trainer = make_trainer(replace(base, optimizer=optimizer, logging=logging), ParallelContext.single())
        figures = run_steps(base, trainer, TrainState(), 2)
        found.append((figures["metric max_attention_logit"], figures))
        layers = {name for name in figures if name.startswith("metric max_attention_logit ")}
        assert len(layers) == len(base.model.layers)
    (_, clipped_weights), (logit, weights) = found
    assert logit > 0.02
    changed = (name for name in weights if not weights[name].equal(clipped_weights[name]))
    differ = {name.rpartition("self_attention.")[2] for name in changed}
    assert {"linear_q_up_proj.weight", "linear_kv_up_proj.weight"} <= differ
