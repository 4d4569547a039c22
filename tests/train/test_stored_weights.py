"""Weights stored in FP8 or FP4 (--fp8-param-gather, --fp4-param-gather): results equal those of quantised copies of
plain weights in every layout.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_moe.checkpoint.load import find_checkpoint, load_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.exit_codes import DriftProblem
from megatron_moe.config.memory import MemoryConfig, RecomputeConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.precision import FloatName, LowPrecisionConfig, PrecisionConfig, low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.layout_check.table import compare_runs
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import named_parameters
from megatron_moe.precision.quantized_tensor import QuantizedTensor
from megatron_moe.precision.quantizers import quantize_weight
from megatron_moe.resilience.replica_check import check_replicas
from megatron_moe.train.checkpointing import saved_tensors
from megatron_moe.train.nan_diagnosis import diagnose_state
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.checkpoint_files import stored_tensors
from tests.helpers.pipelines import make_trainer, run_steps
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.optim.test_state_formats import AWAY
from tests.parity.cells import plan_of as cell_plan
from tests.parity.cells import record, record_one_rank
from tests.parity.dimensions import cell_of

CONFIGS = {
    "blockwise": low_precision_config("blockwise", blocks=8),
    "blockwise, bf16 weight gradients": low_precision_config("blockwise", blocks=8, weight_grad=False),
    "fp32 scales": low_precision_config("blockwise", blocks=8, power_of_2=False, layers_at_start=1),
    "tensorwise": low_precision_config("tensorwise"),
    "delayed": low_precision_config("delayed", hybrid=True, amax_history_len=3, amax_compute_algo="max"),
    "mxfp8": low_precision_config("mxfp8", output_layer=True),
    "nvfp4": low_precision_config("nvfp4", blocks=8),
}
DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}
BF16 = PrecisionConfig(params="bf16", store_param_remainders=True)
SHARDED = DataParallelConfig(use_distributed_optimizer=True)
BLOCKWISE, DELAYED, NVFP4 = (CONFIGS[name] for name in ("blockwise", "delayed", "nvfp4"))


def plan_of(
    config: LowPrecisionConfig, *, stored: bool = True, precision: PrecisionConfig | None = None, **changes
) -> RunPlan:
    """Disables clipping, because the number of buffers changes the last bit of the norm."""
    batch = BatchConfig(micro_batch_size=2, global_batch_size=4)
    plan = tiny.plan(**{"model": tiny.model(moe_config=tiny.moe(dispatcher="alltoall")), "batch": batch, **changes})
    low = replace(precision or plan.precision, low_precision=config, low_precision_params=stored)
    return replace(plan, precision=low, optimizer=replace(plan.optimizer, clip_grad=0.0))


def in_host_memory(plan: RunPlan, away: str) -> RunPlan:
    return replace(plan, optimizer=replace(plan.optimizer, offload=AWAY[away]))


def start(plan: RunPlan, context: ParallelContext | None = None) -> Trainer:
    return make_trainer(plan, context or ParallelContext.single(dtype=DTYPES[plan.precision.params]))


def trained(plan: RunPlan, context: ParallelContext | None = None, steps: int = 2) -> dict[str, Tensor]:
    """Losses, gradients and weights; norms are left out, see `plan_of`."""
    found = run_steps(plan, start(plan, context), TrainState(), steps)
    return {name: value for name, value in found.items() if " norm " not in name}


def weights_and_copies(trainer: Trainer) -> dict[str, tuple[Tensor, tuple[Tensor, ...]]]:
    """Values of all weights that are stored in FP8 or FP4, with the bytes of their elements, scales and factor."""
    with trainer.optimizer.unquantized_weights():
        return {
            name: (parameter.detach().clone(), bytes_of(parameter.stored.operand()))
            for name, parameter in named_parameters(trainer.model)
            if parameter.stored is not None
        }


def bytes_of(weight: QuantizedTensor) -> tuple[Tensor, ...]:
    parts = [part for part in weight.row_copy if part is not None]
    return tuple(part.reshape(-1).contiguous().view(torch.uint8).clone() for part in parts)


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(each, other) for each, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_stored_weights_change_no_bit(name: str, precision: PrecisionConfig | None) -> None:
    expected = trained(plan_of(CONFIGS[name], stored=False, precision=precision))
    EXACT.check_all(trained(plan_of(CONFIGS[name], precision=precision)), expected)


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [(BLOCKWISE, 1), (CONFIGS["mxfp8"], 2), (NVFP4, 0.5), (low_precision_config("nvfp4"), 0.5)],
    ids=["blockwise", "mxfp8", "nvfp4", "nvfp4 with incomplete blocks"],
)
def test_stored_weights_take_no_memory_for_values(config: LowPrecisionConfig, num_bytes: float) -> None:
    """Linear weights have `num_bytes` per element and one NaN as values; all others keep their values, as do weights
    with 24 inputs, which are not whole blocks of 16."""
    trainer = start(plan_of(config, precision=BF16))
    found = dict(named_parameters(trainer.model))
    stored = {name for name, parameter in found.items() if parameter.stored is not None}
    modules = {re.sub(r"decoder\.layers\.\d+\.|\.weight", "", name) for name in stored}
    assert modules == {
        *("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"),
        *("mlp.experts.linear_fc1", *(() if config.weights.block == (16, 16) else ("mlp.experts.linear_fc2",))),
        *(("output_layer",) if config.output_layer else ()),
    }
    for name in stored:
        parameter = found[name]
        assert parameter.isnan().all() and parameter.untyped_storage().nbytes() == parameter.element_size()
    for buffer in trainer.buffers.buffers:
        size = sum(flat.untyped_storage().nbytes() for flat in buffer.codes or (buffer.weights,))
        assert size == buffer.layout.size * (num_bytes if buffer.codes else 2)
        is_stored = {name in stored for name in (place.name for place in buffer.layout.params)}
        assert is_stored == {bool(buffer.codes)}
    remainders = {state.stored.master.format: bool(state.buffer.codes) for state in trainer.optimizer.states}
    assert remainders == {"plain": True, "remainder": False}


LAYOUTS = {
    "dp2": ParallelConfig(world_size=2),
    "dp3": ParallelConfig(world_size=3),
    "dp4, ep2": ParallelConfig(world_size=4, ep=2),
    "dp2, tp2, ep2": ParallelConfig(world_size=4, tp=2, ep=2, sequence_parallel=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("config", "masters"),
    [(BLOCKWISE, "fp32"), (CONFIGS["mxfp8"], "fp16"), (low_precision_config("nvfp4", blocks=4), "fp32")],
    ids=["blockwise", "mxfp8, fp16 masters", "nvfp4"],
)
def test_ranks_whose_shards_cut_blocks_store_the_bytes_of_whole_weights(
    layout: str, config: LowPrecisionConfig, masters: FloatName
) -> None:
    """With buckets of 200 elements, shards begin inside rows and inside scale blocks."""
    plan = plan_of(
        config,
        precision=replace(BF16, main_params_dtype=masters, store_param_remainders=False),
        parallel=LAYOUTS[layout],
        data_parallel=replace(SHARDED, ddp_bucket_size=200),
        batch=replace(tiny.plan().batch, micro_batch_size=1, global_batch_size=12),
    )

    def main(context: ParallelContext) -> int:
        trainer = start(plan, context)
        run_steps(plan, trainer, TrainState(), 2)
        for name, (values, copy) in weights_and_copies(trainer).items():
            expected = bytes_of(quantize_weight(values, config.weights, columnwise=False))
            assert same(copy, expected), name
        owned = [edge for buffer in trainer.buffers.buffers if buffer.codes for edge, _ in buffer.owned]
        places = [place for buffer in trainer.buffers.buffers if buffer.codes for place in buffer.layout.params]
        num_rows = config.weights.block[1]
        return sum(
            place.start < edge < place.end and (edge - place.start) % (num_rows * place.shape[-1]) != 0
            for place in places
            for edge in owned
        )

    cuts = on_threads(plan.parallel, main, dtype=torch.bfloat16)
    assert sum(cuts) > 4, f"{cuts} shards begin inside a block"


@pytest.mark.parametrize("layout", ["dp2", "dp2, tp2, ep2"])
@pytest.mark.parametrize(
    ("config", "overlap"),
    [(DELAYED, "none"), (DELAYED, "gather"), (DELAYED, "step"), (low_precision_config("nvfp4", blocks=4), "step")],
    ids=["delayed, none", "delayed, gather", "delayed, step", "nvfp4, step"],
)
def test_overlapped_gathers_and_steps_change_no_bit(config: LowPrecisionConfig, overlap: str, layout: str) -> None:
    data_parallel = replace(SHARDED, overlap_grad_reduce=True, overlap_param_gather=overlap != "none")
    options = {"parallel": LAYOUTS[layout], "data_parallel": replace(data_parallel, ddp_num_buckets=4)}
    plan, plain = plan_of(config, **options), plan_of(config, stored=False, **options)
    if overlap == "step":
        plan = replace(plan, optimizer=replace(plan.optimizer, overlap_optimizer_step=True))
    found = on_threads(plan.parallel, lambda context: trained(plan, context))
    expected = on_threads(plan.parallel, lambda context: trained(plain, context))
    for rank, each in enumerate(found):
        kept = {name: value for name, value in each.items() if not name.startswith("grad ")}  # sums of other buckets
        EXACT.check_all(kept, {name: expected[rank][name] for name in kept}, f"rank {rank}")
        assert len(kept) < len(expected[rank]), "gradients are left out"


@pytest.mark.parametrize("overlap", [False, True], ids=["", "gather in forward"])
@pytest.mark.parametrize(
    ("name", "precision", "away"),
    [
        *(("delayed", precision, away) for precision in (None, BF16) for away in AWAY),
        ("blockwise", BF16, "half on the host"),
        ("mxfp8", replace(BF16, main_params_dtype="fp16", store_param_remainders=False), "streamed"),
        ("nvfp4", None, "half streamed, in chunks"),
    ],
    ids=str,
)
def test_state_in_host_memory_changes_no_bit(
    name: str, precision: PrecisionConfig | None, away: str, overlap: bool
) -> None:
    """Owners copy their master weights to the device, where they are quantised. The part in host memory ends inside a
    weight."""
    sharded = replace(SHARDED, ddp_bucket_size=300, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    options = {"precision": precision, "parallel": ParallelConfig(world_size=2), "data_parallel": sharded}
    plain, plan = plan_of(CONFIGS[name], stored=False, **options), plan_of(CONFIGS[name], **options)

    def main(context: ParallelContext, plan: RunPlan) -> tuple[dict[str, Tensor], set[str]]:
        trainer = start(plan, context)
        found = run_steps(plan, trainer, TrainState(), 2)
        placements = {state.placement for state in trainer.optimizer.states if state.buffer.codes}
        kept = [key for key in found if " norm " not in key and not key.startswith("grad ")]  # sums of other buckets
        return {key: found[key] for key in kept}, placements

    dtype = DTYPES[plan.precision.params]
    expected = on_threads(plan.parallel, lambda context: main(context, plain), dtype=dtype)
    plan = in_host_memory(plan, away)
    for rank, (found, placements) in enumerate(
        on_threads(plan.parallel, lambda context: main(context, plan), dtype=dtype)
    ):
        EXACT.check_all(found, expected[rank][0], f"rank {rank}")
        assert placements == ({"device"} if "half" in away else set()) | {"streamed" if "streamed" in away else "host"}


def test_recomputed_layers_read_the_same_bytes() -> None:
    whole = RecomputeConfig(recompute_method="uniform", recompute_num_layers=1)
    EXACT.check_all(trained(plan_of(DELAYED, memory=MemoryConfig(recompute=whole))), trained(plan_of(DELAYED)))


IN_FP8 = low_precision_config("blockwise", blocks=4, hybrid=True, weight_grad=False)
CELLS = {
    cell: IN_FP8
    for cell in (
        "dp=2 zero=on overlap=params accumulation=2",
        "dp=4 zero=params ep=2 dispatcher=alltoall shared=on",
        "dp=2 zero=params ep=2 etp=2 tp=2 sp=on dispatcher=allgather accumulation=2",
        "pp=2 vpp=2 dp=2 zero=buffers accumulation=2 mtp=on head=tied",
        "cp=2 zero=grads attention=mla latent=on",
        "dp=2 zero=on layers=dense wgrad=delayed",
        "dp=4 zero=outer ep=2 dispatcher=alltoall accumulation=2",
    )
} | {
    # inputs have one factor per tensor, so that ranks must process whole microbatches
    "dp=2 zero=on accumulation=2 loss=token": NVFP4,
    "dp=2 zero=outer accumulation=2 loss=token": NVFP4,
    "pp=2 dp=4 zero=replicas accumulation=2 head=tied loss=token": NVFP4,
}


@pytest.mark.parametrize("cell", CELLS)
def test_layouts_equal_one_rank_with_unquantized_weights(cell: str) -> None:
    plan = cell_plan(cell_of(cell))
    plain = replace(plan, precision=replace(plan.precision, low_precision=CELLS[cell]))
    stored = replace(plain, precision=replace(plain.precision, low_precision_params=True))
    found = on_threads(plan.parallel, lambda context: record(stored, context))
    comparison = compare_runs(record_one_rank(plain), found, rtol=FP64_LAYOUT.rtol)
    assert comparison.all_equal, comparison.text()


def save(trainer: Trainer, folder: Path, context: ParallelContext) -> None:
    saver = CheckpointSaver(folder, context, say=lambda line: None)
    with trainer.optimizer.unquantized_weights():
        saver.save(2, saved_tensors(trainer, optimizer=True), {"iteration": 2})
    saver.close()


def resume(trainer: Trainer, folder: Path, context: ParallelContext, *, optimizer: bool = True) -> None:
    source = find_checkpoint(CheckpointConfig(load=str(folder), load_optim=optimizer), context, say=lambda line: None)
    with trainer.optimizer.unquantized_weights():
        load_checkpoint(source, saved_tensors(trainer, optimizer=True), context)
        trainer.after_restore(with_optimizer=optimizer)


def on_ranks(plan: RunPlan, main) -> None:
    on_threads(plan.parallel, main, dtype=DTYPES[plan.precision.params])


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("name", ["blockwise", "delayed", "mxfp8", "nvfp4"])
def test_checkpoints_are_those_of_unquantized_weights_and_load_in_any_layout(
    name: str, precision: PrecisionConfig | None, tmp_path: Path
) -> None:
    config = replace(CONFIGS[name], output_layer=False)
    sharded = {"parallel": ParallelConfig(world_size=2, ep=2), "data_parallel": replace(SHARDED, ddp_bucket_size=300)}
    writers = {
        "stored": plan_of(config, precision=precision, **sharded),
        "on-the-host": in_host_memory(plan_of(config, precision=precision, **sharded), "half on the host"),
        "plain": plan_of(config, precision=precision, stored=False, **sharded),
    }
    for folder, plan in writers.items():

        def write(context: ParallelContext, folder: str = folder, plan: RunPlan = plan) -> None:
            trainer = start(plan, context)
            run_steps(plan, trainer, TrainState(), 2)
            save(trainer, tmp_path / folder, context)

        on_ranks(plan, write)
    written = {folder: stored_tensors(tmp_path / folder / "iter_0000002") for folder in writers}
    for folder in writers:
        EXACT.check_all(written[folder], written["plain"], folder)
    readers = {
        "one rank": plan_of(config, precision=precision),
        "plain": plan_of(config, precision=precision, stored=False),
        "one rank, host": in_host_memory(plan_of(config, precision=precision), "half on the host"),
        "tp": plan_of(
            config,
            precision=precision,
            parallel=ParallelConfig(world_size=2, tp=2, sequence_parallel=True),
            data_parallel=SHARDED,
        ),
    }
    for reader, plan in readers.items():
        other = replace(plan, loop=replace(plan.loop, seed=99))

        def read(context: ParallelContext, reader: str = reader, plan: RunPlan = other) -> None:
            trainer = start(plan, context)
            resume(trainer, tmp_path / "plain", context)
            for values, copy in weights_and_copies(trainer).values():
                if name != "delayed":
                    expected = bytes_of(quantize_weight(values, config.weights, columnwise=False))
                    assert same(copy, expected)
            save(trainer, tmp_path / reader.replace(" ", "-"), context)

        on_ranks(plan, read)
        copied = stored_tensors(tmp_path / reader.replace(" ", "-") / "iter_0000002")
        EXACT.check_all(copied, written["plain"], f"loaded with {reader} and saved again")


@pytest.mark.parametrize(
    ("recipe", "away"),
    [("blockwise", None), ("delayed", None), ("delayed", "half on the host"), ("delayed", "streamed"), ("nvfp4", None)],
    ids=str,
)
def test_resume_is_bitwise_identical(recipe: str, away: str | None, tmp_path: Path) -> None:
    plan, context = plan_of(CONFIGS[recipe]), ParallelContext.single()
    plan = in_host_memory(plan, away) if away else plan
    whole = start(plan)
    run_steps(plan, whole, TrainState(), 2)
    save(whole, tmp_path, context)
    state = TrainState(iteration=2, consumed_samples=2 * plan.batch.global_batch_size)
    expected = run_steps(plan, whole, replace(state), 2)
    resumed = start(plan)
    run_steps(plan, resumed, TrainState(), 1)
    resume(resumed, tmp_path, context)
    EXACT.check_all(run_steps(plan, resumed, replace(state), 2), expected)


def test_weights_alone_become_master_weights(tmp_path: Path) -> None:
    plan, context = plan_of(BLOCKWISE, precision=BF16), ParallelContext.single(dtype=torch.bfloat16)
    plain, stored = start(replace(plan, precision=BF16)), start(replace(plan, loop=replace(plan.loop, seed=99)))
    save(plain, tmp_path, context)
    resume(stored, tmp_path, context, optimizer=False)
    expected = {name: value.clone() for name, value in plain.model.state_dict().items()}
    with stored.optimizer.unquantized_weights():
        found = {name: value.clone() for name, value in stored.model.state_dict().items()}
    EXACT.check_all(found, expected)


@pytest.mark.parametrize("away", [None, *AWAY], ids=str)
def test_a_rejected_step_keeps_bytes_and_values(away: str | None) -> None:
    plan = in_host_memory(plan_of(DELAYED), away) if away else plan_of(DELAYED)
    trainer = start(plan)
    run_steps(plan, trainer, TrainState(), 1)
    before = weights_and_copies(trainer)
    trainer._may_continue.fill_(False)
    run_steps(plan, trainer, TrainState(iteration=1), 1)
    for name, (values, copy) in weights_and_copies(trainer).items():
        assert torch.equal(values, before[name][0])
        assert same(copy, before[name][1])


def test_replicas_are_compared_by_their_bytes() -> None:
    plan = plan_of(BLOCKWISE, parallel=ParallelConfig(world_size=2), data_parallel=SHARDED)

    def main(context: ParallelContext) -> None:
        trainer = start(plan, context)
        check_replicas(trainer.model, context, 1)
        buffer = next(buffer for buffer in trainer.buffers.buffers if buffer.codes)
        if context.rank == 1:
            buffer.codes[0][buffer.layout.params[0].start] ^= 1
        with pytest.raises(DriftProblem, match=buffer.layout.params[0].name):
            check_replicas(trainer.model, context, 2)

    on_ranks(plan, main)


def test_only_non_finite_master_weights_are_reported() -> None:
    plan = plan_of(BLOCKWISE)
    trainer = start(plan)
    assert [report.findings for report in diagnose_state(trainer)] == [()]
    state = next(state for state in trainer.optimizer.states if state.buffer.codes)
    state.stored.master.data[0] = torch.nan
    ((finding,),) = (report.findings for report in diagnose_state(trainer))
    assert finding.kind == "weight" and finding.name == state.buffer.layout.params[0].name
