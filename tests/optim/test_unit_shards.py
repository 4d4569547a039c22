"""Reduction of gradients to shards that are empty or smaller than a rank's share, and dtypes of main gradients."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from arguments.read import read_plan
from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.optim import unit_shards
from megatron_moe.optim.grad_buffers import finish_grads
from megatron_moe.optim.unit_shards import UnitBuffer, UnitSharding, nccl_fallback_notes
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.command_lines import plan_of as plan_of_flags
from tests.helpers.optim_parameters import BF16, FP64, KINDS, make_buffers, make_gradients, make_parameters
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.optim.test_fsdp import ZERO_2, ZERO_3, plan, sharded, train
from tests.parity.cells import plan_of
from tests.parity.dimensions import cell_of

TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
NUM_RANKS, NUM_MICROBATCHES = 5, 2
COPIES = FSDPConfig(gathers_from_peers=True, reduces_through_peers=True)


def reduced(
    rule: str,
    config: FSDPConfig,
    context: ParallelContext,
    precision: PrecisionConfig = FP64,
    gradients_of: Callable[[int], dict[str, Tensor]] = make_gradients,
) -> tuple[dict[str, Tensor], set[int]]:
    """Reduces gradients of parameters of all kinds. Returns those that this rank owns, in flat tensors with zeros
    elsewhere, and the sizes of its shards. `gradients_of`: gradients of a microbatch, numbered across ranks."""
    parallel = DataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, fsdp=config)
    buffers = make_buffers(
        make_parameters(context.dtype),
        precision,
        context=context,
        optimizer=OptimizerConfig(optimizer=rule),
        data_parallel=parallel,
        sharding=UnitSharding(config),
    )
    buffers.begin_step(NUM_MICROBATCHES)
    for microbatch in range(NUM_MICROBATCHES):
        gradients = gradients_of(NUM_MICROBATCHES * context.rank + microbatch)
        for each in buffers.main_grads:
            each.add(lambda out, accumulate, grad=gradients[each.name]: out.copy_(grad))
    finish_grads(buffers, context)
    found = {name: torch.zeros(shape, dtype=torch.float64).flatten() for name, (shape, _) in KINDS.items()}
    sizes = set()
    for buffer in buffers.buffers:
        assert isinstance(buffer, UnitBuffer)
        for start, end in buffer.owned:
            sizes.add(end - start)
            for index in buffer.layout.param_indices_between(start, end):
                param = buffer.layout.params[index]
                first, last = max(start, param.start), min(end, param.end)
                found[param.name][first - param.start : last - param.start] = buffer.owned_grads(first, last)
    return found, sizes


@pytest.mark.parametrize("config", [ZERO_3, ZERO_2, COPIES], ids=["zero-3", "zero-2", "copies"])
@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_tiny_parameters_and_empty_shards_are_reduced(rule: str, config: FSDPConfig) -> None:
    """Some parameters have fewer elements than there are ranks. Muon gives the only matrix of a unit to one rank."""
    found = on_threads(
        ParallelConfig(world_size=NUM_RANKS), lambda context: reduced(rule, config, context), dtype=torch.float64
    )
    microbatches = [make_gradients(step) for step in range(NUM_RANKS * NUM_MICROBATCHES)]
    for name in KINDS:
        mean = sum(each[name].flatten() for each in microbatches) / NUM_RANKS
        FP64_LAYOUT.check(sum(own[name] for own, _ in found), mean, name)
    assert (0 in set().union(*(sizes for _, sizes in found))) == (rule == "muon")


@pytest.mark.parametrize("config", [ZERO_3, ZERO_2, COPIES], ids=["zero-3", "zero-2", "copies"])
def test_gradients_sent_in_bf16_are_accumulated_in_fp32(config: FSDPConfig) -> None:
    """Contributions are rounded to bf16. Their sum over two ranks is exact in bf16, that over microbatches only in
    fp32."""
    config, num_ranks = replace(config, grad_comm="bf16"), 2

    def gradients_of(number: int) -> dict[str, Tensor]:
        """Integers from 64 to 127 times a power of two that differs between microbatches, and less than half a unit in
        the last place of bf16."""
        source = torch.Generator().manual_seed(number)
        found = {}
        for name, (shape, _) in KINDS.items():
            integers = torch.randint(64, 128, shape, generator=source).double()
            excess = 0.2 * torch.rand(shape, generator=source, dtype=torch.float64)
            found[name] = (integers + excess) / 256 ** (number % NUM_MICROBATCHES)
        return found

    found = on_threads(
        ParallelConfig(world_size=num_ranks),
        lambda context: reduced("adam", config, context, BF16, gradients_of)[0],
        dtype=torch.bfloat16,
    )
    microbatches = [gradients_of(number) for number in range(num_ranks * NUM_MICROBATCHES)]
    for name in KINDS:
        rounded = [each[name].flatten().bfloat16() for each in microbatches]
        mean = sum(each.double() for each in rounded) / num_ranks
        EXACT.check(sum(own[name] for own in found), mean, name)
        assert (mean.bfloat16() != mean).any() and any(
            (a != b[name].flatten()).any() for a, b in zip(rounded, microbatches, strict=True)
        )


@pytest.mark.parametrize(("strategy", "zero"), [("no_shard", "zero=off"), ("optim", "zero=on")])
def test_strategies_without_gradient_sharding_train_as_zero_0_and_zero_1(strategy: str, zero: str) -> None:
    read = plan_of_flags(f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}", environ=TWO_RANKS)
    base = plan_of(cell_of(f"dp=2 {zero} balance=none accumulation=2"))
    runs = base, replace(base, data_parallel=read.data_parallel)
    assert read.data_parallel.fsdp is None
    expected, found = (
        on_threads(run.parallel, lambda context, run=run: train(run, context)[0], dtype=torch.float64) for run in runs
    )
    for mine, others in zip(found, expected, strict=True):
        EXACT.check_all(mine, others, "losses, norms and weights")


def test_shards_over_hosts_are_reduced_by_collectives_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_shards.PeerReduce, "__init__", None)

    def rank_main(context: ParallelContext) -> tuple[dict[str, Tensor], list[str]]:
        assert list(nccl_fallback_notes(COPIES, context)) == []
        context.process = replace(context.process, local_world_size=2)
        found, _ = reduced("adam", COPIES, context)
        return found, list(nccl_fallback_notes(COPIES, context))

    results = on_threads(ParallelConfig(world_size=4), rank_main)
    for name in KINDS:
        mean = sum(make_gradients(step)[name].flatten() for step in range(4 * NUM_MICROBATCHES)) / 4
        FP64_LAYOUT.check(sum(found[name] for found, _ in results), mean, name)
    dense, experts = results[0][1]
    why = "by NCCL, because their 4 ranks are on 2 hosts"
    assert dense == f"--use-megatron-fsdp: shards of dense parameters are gathered and reduced {why}"
    assert experts == f"--use-megatron-fsdp: shards of experts are gathered and reduced {why}"


@pytest.mark.parametrize("config", [ZERO_3, replace(ZERO_2, reduces_through_peers=True)], ids=["zero-3", "zero-2"])
@pytest.mark.parametrize("dtype", ["auto", "fp32", "bf16"])
def test_main_gradients_have_the_dtype_of_the_flag_and_the_values_of_zero_1(dtype: str, config: FSDPConfig) -> None:
    """One microbatch per step and two ranks, so that both strategies round the same sums."""
    words = "--config scripts/recipes/parts/transformer.yaml --mock-data --tokenizer-type NullTokenizer "
    words += "--vocab-size 512 --num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 1 "
    words += "--ffn-hidden-size 64 --max-position-embeddings 64 --lr 1e-4 --bf16 --device cpu --micro-batch-size 1 "

    def precision(flags: str) -> PrecisionConfig:
        return read_plan([*words.split(), *flags.split()], {}, vocab_size_of=lambda config: 1).precision

    of_fsdp = precision(f"--use-megatron-fsdp --megatron-fsdp-main-grads-dtype {dtype}")
    of_zero_1 = precision(f"--use-distributed-optimizer {'--grad-reduce-in-bf16' if dtype == 'bf16' else ''}")
    assert of_fsdp == of_zero_1 and of_fsdp.grads == ("bf16" if dtype == "bf16" else "fp32")

    base = replace(plan("plain"), precision=of_zero_1)
    runs = base, sharded(replace(base, precision=of_fsdp), config)
    expected, found = (
        on_threads(run.parallel, lambda context, run=run: train(run, context)[0], dtype=torch.bfloat16) for run in runs
    )
    for mine, others in zip(found, expected, strict=True):
        weights = {name: value for name, value in mine.items() if "." in name}
        assert len(weights) > 20
        EXACT.check_all(weights, {name: others[name] for name in weights}, "weights")
