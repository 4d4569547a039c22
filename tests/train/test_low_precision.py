"""FP8 and FP4 training by emulation: layers that use it, recompute and offload, delayed scales, resume."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_moe.build import build_data, build_model, build_train_loader
from megatron_moe.checkpoint.load import find_checkpoint, load_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.memory import ActivationOffloadConfig, MemoryConfig, PagedStashConfig, RecomputeConfig
from megatron_moe.config.model import MTPConfig
from megatron_moe.config.moe import SharedExpertsConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import LowPrecisionConfig, low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.layers.quantized_module import QuantizedModule
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.precision.linear_quantizer import DelayedScaling, ModelQuantizers
from megatron_moe.train.checkpointing import saved_tensors
from megatron_moe.train.evaluation import evaluate
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer
from tests.helpers import tiny, tiny_models
from tests.helpers.pipelines import KERNELS, make_trainer, run_steps
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

CONFIGS = {
    "blockwise": low_precision_config("blockwise", blocks=8),
    "blockwise, bf16 weight gradients": low_precision_config("blockwise", blocks=8, weight_grad=False),
    "delayed": low_precision_config("delayed", hybrid=True, amax_history_len=3, amax_compute_algo="max"),
    "mxfp8": low_precision_config("mxfp8"),
    "nvfp4": low_precision_config("nvfp4"),
}
SHARED = SharedExpertsConfig(mlp=tiny_models.mlp_config(ffn_hidden_size=16), gate=True)


def plan_of(config: LowPrecisionConfig, **changes) -> RunPlan:
    batch = BatchConfig(micro_batch_size=2, global_batch_size=4)
    plan = tiny.plan(**{"model": tiny.model(moe_config=tiny.moe(shared=SHARED)), "batch": batch, **changes})
    return replace(plan, precision=replace(plan.precision, low_precision=config))


def trained(plan: RunPlan, steps: int = 2) -> dict[str, Tensor]:
    return run_steps(plan, make_trainer(plan, ParallelContext.single()), TrainState(), steps)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_infinite_operand_of_a_cast_is_not_saturated_but_skips_the_update(config: LowPrecisionConfig) -> None:
    plan = plan_of(config)
    trainer = make_trainer(plan, ParallelContext.single())
    with torch.no_grad():
        trainer.model.get_parameter("decoder.layers.0.input_layernorm.weight")[0] = torch.inf  # read by linear_qkv only
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    loader = build_train_loader(plan, trainer.context, build_data(plan, trainer.context))
    assert loader is not None
    outcome = trainer.step(loader.next_step(), TrainState())
    assert not torch.isfinite(outcome.loss) and not outcome.apply_update
    EXACT.check_all(dict(trainer.model.named_parameters()), before)


def selective(*modules: str) -> MemoryConfig:
    return MemoryConfig(
        recompute=RecomputeConfig(recompute_modules=modules)  # type: ignore[arg-type]
    )


POLICIES = {
    "full recompute": MemoryConfig(recompute=RecomputeConfig(recompute_method="uniform", recompute_num_layers=1)),
    "small modules": selective("core_attn", "moe_act", "layernorm", "mlp", "shared_experts"),
    "moe": selective("moe"),
    "offload": MemoryConfig(
        offload=ActivationOffloadConfig(
            offload_modules=("qkv_linear", "attn_proj", "expert_fc1", "moe_act"), min_offloaded_tensor_size=1
        )
    ),
    "paged stash": MemoryConfig(
        paged_stash=PagedStashConfig(moe_paged_stash_page_size=4, moe_paged_stash_buffer_size_factor_cuda=4.0)
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_recomputed_and_stored_activations_give_the_same_bits(config: LowPrecisionConfig, policy: str) -> None:
    """Recompute quantises the same values again; columnwise copies and unquantised tensors are saved, offloaded and
    restored."""
    expected = trained(plan_of(config))
    EXACT.check_all(trained(plan_of(config, memory=POLICIES[policy])), expected, policy)


def modules_with_fp8(config: LowPrecisionConfig) -> set[str]:
    mtp = MTPConfig(num_layers=1, loss_scaling_factor=0.1)
    plan = plan_of(config)
    plan = replace(plan, model=replace(plan.model, mtp=mtp))
    model = make_trainer(plan, ParallelContext.single()).model
    found = {name: module for name, module in model.named_modules() if getattr(module, "quantizer", None) is not None}
    assert all(module.quantizer.name == name for name, module in found.items()), "the key of stochastic rounding"
    return set(found)


def test_linear_layers_of_the_chosen_layers_use_fp8() -> None:
    """Router, embedding, norms, gates and output layer are never quantised; layers of multi-token prediction always
    are."""
    config = CONFIGS["mxfp8"]
    found = modules_with_fp8(config)
    attention = ("self_attention.linear_qkv", "self_attention.linear_proj")
    moe = (f"mlp.{part}.linear_fc{number}" for part in ("experts", "shared_experts") for number in (1, 2))
    in_moe = (*attention, *moe)
    mtp = {"mtp.layers.0.eh_proj", *(f"mtp.layers.0.transformer_layer.{name}" for name in in_moe)}
    dense = {f"decoder.layers.0.{name}" for name in (*attention, "mlp.linear_fc1", "mlp.linear_fc2")}
    first, second = ({f"decoder.layers.{layer}.{name}" for name in in_moe} for layer in (1, 2))
    assert found == dense | first | second | mtp
    assert modules_with_fp8(replace(config, layers_at_start=1, layers_at_end=1)) == first | mtp
    assert modules_with_fp8(replace(config, layers_at_start=0, layers_at_end=2)) == dense | mtp
    assert modules_with_fp8(replace(config, output_layer=True)) == found | {"output_layer"}


def test_quantizers_of_all_kinds_of_layers_have_their_names() -> None:
    """Covers latent attention, latent experts and shared experts."""
    plan = replace(plan_of(CONFIGS["mxfp8"]), model=LATENT)
    model = build_model(plan, ParallelContext.single(), KERNELS)
    names = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedModule)}
    assert {module.quantizer and module.quantizer.name for module in names.values()} == {*names} - {"output_layer"} | {
        None
    }


def test_only_experts_can_have_weight_gradients_in_the_parameter_dtype() -> None:
    config = replace(CONFIGS["blockwise"], expert_weight_grad=False)
    model = make_trainer(plan_of(config), ParallelContext.single()).model
    in_low = {
        name: module.quantizer.weight_grad
        for name, module in model.named_modules()
        if getattr(module, "quantizer", None) is not None
    }
    assert in_low == {name: ".experts." not in name for name in in_low}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_runs_are_reproducible_and_differ_from_runs_without_low_precision(config: LowPrecisionConfig) -> None:
    found = trained(plan_of(config))
    EXACT.check_all(trained(plan_of(config)), found, "the same run again")
    plain = plan_of(config)
    plain = replace(plain, precision=replace(plain.precision, low_precision=None))
    expected = trained(plain)["loss 2"]
    assert 0 < abs(float(found["loss 2"] / expected - 1)) < 0.02


LATENT = tiny.model(
    layers=(
        tiny_models.layer_config(tiny_models.mla_config(num_heads=2), feed_forward=tiny_models.mlp_config()),
        tiny_models.layer_config(feed_forward=tiny.moe(shared=SHARED)),
        tiny_models.layer_config(
            tiny_models.mla_config(num_heads=2, q_lora_rank=None), feed_forward=tiny.moe(shared=SHARED)
        ),
    )
)
PLAIN = CONFIGS["blockwise, bf16 weight gradients"]
IN_ATTENTION = ("0.self_attention.q_layernorm", "0.self_attention.kv_layernorm", "2.self_attention.kv_layernorm")
BEFORE_LINEAR = {*IN_ATTENTION, *(f"{layer}.{norm}_layernorm" for layer in range(3) for norm in ("input", "pre_mlp"))}


def norms_with_casts(config: LowPrecisionConfig, context: ParallelContext) -> set[str]:
    model = build_model(replace(plan_of(config), model=LATENT), context, KERNELS)
    layers = model.decoder.layers if hasattr(model.decoder, "layers") else model.decoder
    return {name for name, module in layers.named_modules() if getattr(module, "copy_format", None) is not None}


def test_norms_before_layers_that_save_their_input_write_its_copy() -> None:
    single = ParallelContext.single()
    assert norms_with_casts(PLAIN, single) == BEFORE_LINEAR
    assert norms_with_casts(CONFIGS["blockwise"], single) == {"1.pre_mlp_layernorm", "2.pre_mlp_layernorm"}, (
        "the router saves its input"
    )
    assert norms_with_casts(replace(PLAIN, layers_at_start=1), single) == {n for n in BEFORE_LINEAR if n[0] != "0"}
    assert not norms_with_casts(CONFIGS["delayed"], single)
    sharded = ParallelConfig(world_size=2, tp=2, sequence_parallel=True)
    for found in on_threads(sharded, lambda context: norms_with_casts(PLAIN, context)):
        assert found == {"0.input_layernorm"}, (
            "of linear layers without shards; without a q latent, kv shares its input"
        )


@pytest.mark.parametrize("policy", [None, "full recompute", "small modules"])
@pytest.mark.parametrize("config", [PLAIN, CONFIGS["blockwise"]], ids=["bf16 weight gradients", "weight gradients"])
def test_casts_fused_into_norms_change_no_bit(
    config: LowPrecisionConfig, policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def count(op: str, *given: object, **named: object) -> object:
        calls[op] += 1
        return getattr(reference, op)(*given, **named)

    for op in ("quantize_rows", "rms_norm_quantized"):
        monkeypatch.setattr(KERNELS, op, partial(count, op))
    memory = {} if policy is None else {"memory": POLICIES[policy]}
    plan = replace(plan_of(config, **memory), model=LATENT)
    fused, num_fused = trained(plan), calls.copy()
    monkeypatch.setattr(KERNELS, "fuses_norms", False)
    calls.clear()
    EXACT.check_all(trained(plan), fused, "separate casts")
    assert calls["rms_norm_quantized"] == 0 < num_fused["rms_norm_quantized"]
    assert num_fused.total() == calls.total(), "every copy is used"


def test_an_evaluation_quantises_the_weights_of_the_last_step() -> None:
    plan, context = plan_of(CONFIGS["blockwise"]), ParallelContext.single()
    trainer, loader = make_trainer(plan, context), build_train_loader(plan, context, build_data(plan, context))
    batches = loader.next_step()
    trainer.step(batches, TrainState())
    found = evaluate(trainer.pipeline, [batches])
    trainer.low_precision.invalidate_weights()
    assert found == evaluate(trainer.pipeline, [batches]), "the evaluation used earlier weights"


def test_stochastic_rounding_differs_between_runs_iterations_and_layers() -> None:
    trainer = make_trainer(plan_of(CONFIGS["nvfp4"]), ParallelContext.single())
    first, second, *_ = trainer.low_precision.layers
    grad = torch.randn(32, 32)

    def draw(layer, iteration: int, seed: int = 1) -> Tensor:
        ModelQuantizers([layer], seed, lambda flat: flat).begin_step(iteration)
        return layer.quantize_grad(grad, rowwise=True, columnwise=False).row_copy.data

    same, *others = (draw(first, 1), draw(first, 2), draw(first, 1, seed=2), draw(second, 1))
    assert torch.equal(draw(first, 1), same)
    assert not any(torch.equal(other, same) for other in others)


def test_delayed_scales_follow_the_history() -> None:
    config = low_precision_config("delayed", hybrid=True, amax_history_len=2, amax_compute_algo="max", margin=1)
    scaling = DelayedScaling(config, torch.device("cpu"), num_experts=2, first=1)
    yes, largest = torch.tensor(True), [448.0, 448.0, 57344.0]

    def step(amax: float, apply_update: Tensor = yes) -> Tensor:
        scaling.amax.zero_()
        for role in range(3):
            scaling.operand_scale(role, torch.tensor([amax]), record=True)
            scaling.operand_scale(role, torch.tensor([amax / 2]), record=True)
            scaling.operand_scale(role, torch.tensor([amax * 2]), record=False)
        history = scaling.history.clone()
        scaling.update(apply_update)
        assert bool(apply_update) and amax > 0 or torch.equal(scaling.history, history), "no magnitude, or no step"
        assert scaling.scales[:, 0].tolist() == [1.0] * 3, "the expert of another rank has no rows"
        return scaling.scales[:, 1] / torch.tensor(largest)

    assert step(4.0).tolist() == [1 / 8] * 3, "margin 1 halves the scale"
    assert step(2.0).tolist() == [1 / 8] * 3, "the largest of two steps"
    assert step(1.0).tolist() == [1 / 4] * 3
    assert step(8.0, torch.tensor(False)).tolist() == [1 / 4] * 3, "the step was rejected"
    assert step(0.0).tolist() == [1 / 4] * 3, "no magnitude keeps the history"
    assert step(0.5).tolist() == [1 / 2] * 3
    assert step(0.5).tolist() == [1.0] * 3
    assert step(float("inf")).tolist() == [1.0] * 3
    recent = DelayedScaling(replace(config, amax_compute_algo="most_recent"), torch.device("cpu"), None, 0)
    for amax, expected in ((4.0, 1 / 8), (2.0, 1 / 4)):
        recent.amax.zero_()
        recent.operand_scale(0, torch.tensor(amax), record=True)
        recent.update(yes)
        assert float(recent.scales[0]) == 448 * expected


def test_a_rejected_step_keeps_weights_and_scales() -> None:
    plan = plan_of(CONFIGS["delayed"])
    trainer = make_trainer(plan, ParallelContext.single())
    run_steps(plan, trainer, TrainState(), 1)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert any(name.endswith("fp8_scales") and (value != 1).any() for name, value in before.items())
    trainer._may_continue.fill_(False)
    run_steps(plan, trainer, TrainState(iteration=1), 1)
    EXACT.check_all(trainer.model.state_dict(), before)


BF16_SCALES = "the checkpoint has no delayed FP8 scales of some layers"
OTHER_STATE: dict[str, tuple[LowPrecisionConfig | None, LowPrecisionConfig | None, str]] = {
    "to blockwise": (CONFIGS["delayed"], CONFIGS["blockwise"], "of the checkpoint are ignored in layers that use none"),
    "to bf16": (CONFIGS["delayed"], None, "of the checkpoint are ignored in layers that use none"),
    "from bf16": (None, CONFIGS["delayed"], BF16_SCALES),
    "in more layers": (replace(CONFIGS["delayed"], layers_at_end=1), CONFIGS["delayed"], BF16_SCALES),
    "cut": (CONFIGS["delayed"], replace(CONFIGS["delayed"], amax_history_len=2), "the 2 newest steps are used"),
    "padded": (
        CONFIGS["delayed"],
        replace(CONFIGS["delayed"], amax_history_len=5),
        "the history of older steps starts empty",
    ),
}


@pytest.mark.parametrize("optimizer", [True, False], ids=["resume", "weights only"])
@pytest.mark.parametrize("change", OTHER_STATE)
def test_state_of_delayed_scaling_is_optional(change: str, optimizer: bool, tmp_path: Path) -> None:
    """Missing state starts with scale 1 and an empty history; a history of another length is cut or padded; unused
    state is ignored."""
    before, after, message = OTHER_STATE[change]
    context, notes = ParallelContext.single(), []
    plan = plan_of(CONFIGS["mxfp8"])
    trained, resumed = (
        make_trainer(replace(plan, precision=replace(plan.precision, low_precision=config)), context)
        for config in (before, after)
    )
    run_steps(plan, trained, TrainState(), 3)
    saver = CheckpointSaver(tmp_path, context, say=lambda line: None)
    saver.save(3, saved_tensors(trained, optimizer=True), {"iteration": 3})
    saver.close()
    fresh = {name: value.clone() for name, value in resumed.model.state_dict().items()}
    config = CheckpointConfig(load=str(tmp_path), load_optim=optimizer)
    load_checkpoint(find_checkpoint(config, context), saved_tensors(resumed, optimizer=True), context, say=notes.append)
    assert len(notes) == 1 and message in notes[0]
    saved, found = trained.model.state_dict(), resumed.model.state_dict()
    for name, value in found.items():
        expected = saved.get(name, fresh[name])
        if name.endswith("fp8_amax_history") and name in saved:
            expected, num_kept = fresh[name], min(len(value), len(saved[name]))
            expected[:num_kept] = saved[name][:num_kept]
        EXACT.check(value, expected, name)


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_resume_is_bitwise_identical(recipe: str, tmp_path: Path) -> None:
    """Scales and amax histories are saved; the numbers of stochastic rounding depend on the iteration."""
    plan, context = plan_of(CONFIGS[recipe]), ParallelContext.single()
    whole = make_trainer(plan, context)
    run_steps(plan, whole, TrainState(), 2)
    saver = CheckpointSaver(tmp_path, context, say=lambda line: None)
    saver.save(2, saved_tensors(whole, optimizer=True), {"iteration": 2})
    saver.close()
    state = TrainState(iteration=2, consumed_samples=2 * plan.batch.global_batch_size)
    expected = run_steps(plan, whole, replace(state), 2)
    resumed: Trainer = make_trainer(plan, context)
    load_checkpoint(
        find_checkpoint(CheckpointConfig(save=tmp_path), context), saved_tensors(resumed, optimizer=True), context
    )
    resumed.after_restore(with_optimizer=True)
    EXACT.check_all(run_steps(plan, resumed, replace(state), 2), expected)
