"""Optimizer state in narrow formats and in host memory: results are identical unless the format rounds."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_moe.config.optimizer import OptimizerConfig, OptimizerOffloadConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.optim.clip_grads import clip_coefficient, gradient_norms
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.parallel.context import ParallelContext, torch_dtype
from tests.helpers import optim_ranks
from tests.helpers.optim_parameters import BF16, FP32, FP64, make_gradients, make_parameters, set_grads
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT
from tests.optim.test_sharded_state import restored, save

REMAINDERS = replace(BF16, store_param_remainders=True)
NARROW = {
    "bf16 moments": replace(REMAINDERS, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
    "fp8 moments": replace(REMAINDERS, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8"),
    "fp16 masters": replace(BF16, main_params_dtype="fp16", exp_avg_dtype="fp16", exp_avg_sq_dtype="fp16"),
}
AWAY = {
    "host": OptimizerOffloadConfig(fraction=1.0, cpu_step=True),
    "half on the host": OptimizerOffloadConfig(fraction=0.5, cpu_step=True, overlap_cpu_optimizer_d2h_h2d=True),
    "streamed": OptimizerOffloadConfig(fraction=1.0),
    "half streamed, in chunks": OptimizerOffloadConfig(fraction=0.5, chunk_bytes=2048),
}
RESIDENT = OptimizerOffloadConfig()
SPEC = OptimizerConfig(adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-6)


class Rig:
    """Optimizer with parameters of all kinds, large enough for several blocks of state."""

    def __init__(
        self,
        precision: PrecisionConfig = FP64,
        offload: OptimizerOffloadConfig = RESIDENT,
        backend: str = "reference",
        device: str = "cpu",
        config: OptimizerConfig = SPEC,
    ) -> None:
        dtype = torch_dtype(precision.params)
        self.parameters = make_parameters(dtype)
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)
        kernels = select_kernels(KernelConfig(kernel_backend=backend), torch.device(device), dtype)
        context, config = ParallelContext.single(device=device), replace(config, offload=offload)
        self.buffers = GradBuffers(self.parameters.items(), precision, context, kernels, optimizer=config)
        self.optimizer = Optimizer(self.buffers, precision)

    def apply(
        self, gradients: dict[str, Tensor], *, apply_update: bool = True, lr: float = 3e-2, clip: float = 1.0
    ) -> None:
        """Clips the gradients and runs one optimizer step."""
        set_grads(self.buffers, gradients)
        scale = clip_coefficient(gradient_norms(self.buffers, self.buffers.context)["all"], clip)
        flag = torch.full((), apply_update, device=self.buffers.device)
        decoupled_lr = None if self.buffers.optimizer.decoupled_lr is None else 10 * lr
        self.optimizer.step(lr=lr, weight_decay=0.1, grad_scale=scale, apply_update=flag, decoupled_lr=decoupled_lr)

    def step(self, number: int, *, apply_update: bool = True) -> None:
        gradients = make_gradients(number)
        if not apply_update:
            gradients["output_layer.weight"][0, 0] = torch.nan
            gradients["decoder.layers.0.mlp.experts.linear_fc1.weight"].fill_(torch.inf)
        self.apply(gradients, apply_update=apply_update)

    def steps(self, first: int, last: int) -> "Rig":
        for number in range(first, last + 1):
            self.step(number)
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def saved(self) -> dict[str, Tensor]:
        """Returns the whole weights and optimizer state that a checkpoint contains, by name."""
        found = dict(self.weights())
        for each in self.optimizer.named_state():
            key, data = f"{each.kind} {each.name}", each.data.to(self.buffers.device, copy=True)
            found[key] = torch.cat([found[key], data]) if key in found else data
        return found

    def bits(self) -> dict[str, Tensor]:
        """Returns all tensors that a step may change, in their storage format."""
        states = enumerate(self.optimizer.states)
        kept = {f"{i} {j}": part.clone() for i, s in states for j, part in enumerate(s.stored.tensors)}
        return {**kept, **self.weights(), "step": self.optimizer.step_count.clone()}


@pytest.mark.parametrize("backend", ["reference", "torch_native"])
def test_remainders_give_the_run_of_fp32_masters(backend: str) -> None:
    small, plain = Rig(REMAINDERS, backend=backend), Rig(BF16, backend=backend)
    for number in range(1, 31):
        small.step(number)
        plain.step(number)
        EXACT.check_all(small.saved(), plain.saved(), f"weights, masters and moments after {number} steps")


WIDE_OR_NARROW = {"fp32": FP32, "bf16": BF16, **NARROW}


@pytest.mark.parametrize(
    ("precision", "backend"),
    [(FP64, "reference"), *product(WIDE_OR_NARROW.values(), ("reference", "torch_native"))],
    ids=["fp64-reference", *map("-".join, product(WIDE_OR_NARROW, ("reference", "torch_native")))],
)
@pytest.mark.parametrize("away", AWAY)
def test_state_in_host_memory_gives_the_numbers_of_resident_state(precision, away: str, backend: str) -> None:
    resident, other = Rig(precision, backend=backend), Rig(precision, AWAY[away], backend)
    assert any(state.placement != "device" for state in other.optimizer.states)
    resident.steps(1, 5)
    other.steps(1, 5)
    EXACT.check_all(other.saved(), resident.saved(), "weights and state")
    EXACT.check(other.optimizer.params_norm(), resident.optimizer.params_norm(), "norm") if away == "streamed" else None


EVERY_FORMAT = {"fp64": FP64, "bf16": BF16, "remainders": REMAINDERS, **NARROW}


@pytest.mark.parametrize("precision", EVERY_FORMAT.values(), ids=EVERY_FORMAT)
@pytest.mark.parametrize("away", [None, *AWAY])
def test_a_rejected_step_keeps_every_bit_for_any_gradients(precision, away: str | None) -> None:
    for num_before in (0, 2):
        rig = Rig(precision, AWAY[away] if away else RESIDENT).steps(1, num_before)
        before = rig.bits()
        rig.step(3, apply_update=False)
        EXACT.check_all(rig.bits(), before, f"state after {num_before} steps and a rejected one")
    undisturbed = Rig(precision, AWAY[away] if away else RESIDENT).steps(1, 3)
    EXACT.check_all(rig.steps(3, 3).bits(), undisturbed.bits(), "state one step later")


@pytest.mark.parametrize("precision", EVERY_FORMAT.values(), ids=EVERY_FORMAT)
@pytest.mark.parametrize("away", [None, *AWAY])
def test_a_run_continues_from_its_checkpoint_bit_for_bit(precision, away: str | None) -> None:
    offload = AWAY[away] if away else RESIDENT
    straight, resumed = Rig(precision, offload).steps(1, 3), Rig(precision, offload)
    load_into(straight, resumed)
    EXACT.check_all(resumed.saved(), straight.saved(), "after loading")
    EXACT.check_all(resumed.steps(4, 5).saved(), straight.steps(4, 5).saved(), "two steps later")


def test_checkpoints_convert_between_all_formats() -> None:
    plain = Rig(BF16).steps(1, 3)
    for name, precision in {"remainders": REMAINDERS, **NARROW}.items():
        narrow = Rig(precision)
        load_into(plain, narrow)
        back = Rig(BF16)
        load_into(narrow, back)
        for key, value in plain.saved().items():
            kind = key.split()[0]
            if name == "remainders" or (kind == "master" and "masters" not in name):
                EXACT.check(back.saved()[key], value, f"{key} through {name}")
            else:
                error = (back.saved()[key].float() - value.float()).abs().max() / value.float().abs().max()
                assert float(error) < (0.13 if "fp8" in name else 2.0**-7), f"{key} through {name}: {float(error)}"


def test_the_fraction_sets_the_number_of_elements_in_host_memory() -> None:
    for fraction in (0.25, 0.5, 1.0):
        rig = Rig(BF16, OptimizerOffloadConfig(fraction=fraction, cpu_step=True))
        for buffer in rig.buffers.buffers:
            away = sum(s.size for s in rig.optimizer.states if s.buffer is buffer and s.placement == "host")
            assert away == min(-(-int(fraction * buffer.layout.size) // 128) * 128, buffer.layout.size)
            assert away % 128 == 0 or away == buffer.layout.size


def test_the_torch_kernel_on_the_host_steps_as_the_reference_does() -> None:
    config = replace(AWAY["host"], use_torch_optimizer_for_cpu_offload=True)
    theirs, ours = Rig(FP32, config).steps(1, 5).weights(), Rig(FP32).steps(1, 5).weights()
    for name, weight in ours.items():
        assert float((theirs[name] - weight).abs().max()) < 1e-6, name


@pytest.mark.parametrize("away", [None, *AWAY])
def test_shards_hold_the_same_state_as_one_rank(away: str | None) -> None:
    """Remainders, optionally in host memory, give the weights of fp32 masters on shards of both grids.

    ZeRO-1 is combined with tensor, pipeline and expert parallelism. Sums of gradients are exact here, so weights are
    compared bit for bit.
    """
    layout = ParallelConfig(world_size=8, tp=2, pp=2, ep=2)
    config = replace(optim_ranks.SPEC, offload=AWAY[away] if away else RESIDENT)
    zero = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=100)

    def train(precision: PrecisionConfig, optimizer: OptimizerConfig) -> list[optim_ranks.Run]:
        return on_threads(
            layout,
            lambda context: optim_ranks.run(context, zero, precision=precision, optimizer=optimizer),
            dtype=torch.bfloat16,
        )

    small, plain = train(REMAINDERS, config), train(BF16, optim_ranks.SPEC)
    EXACT.check_all(optim_ranks.joined(small), optim_ranks.joined(plain), "weights")


def test_another_layout_loads_a_checkpoint_of_narrow_state(tmp_path: Path) -> None:
    zero = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=100)
    precision = NARROW["bf16 moments"]

    def write(context: ParallelContext) -> optim_ranks.Run:
        run = optim_ranks.run(context, zero, precision=precision)
        save(run.optimizer, tmp_path)
        return run

    written = on_threads(ParallelConfig(world_size=4, ep=2), write, dtype=torch.bfloat16)
    alone = restored(ParallelContext.single(dtype=torch.bfloat16), DataParallelConfig(), precision, tmp_path)
    weights = {each.name: each.parameter.data for each in alone.buffers.main_grads}
    EXACT.check_all(weights, optim_ranks.joined(written), "weights")
    assert all(bool(each.data.any()) for each in alone.named_state())


def load_into(source: Rig, into: Rig) -> None:
    """Loads the checkpoint of one rig into another rig."""
    saved = source.saved()
    done: dict[str, int] = {}
    for each in into.optimizer.named_state():
        key = f"{each.kind} {each.name}"
        start = done.get(key, 0)
        each.data.copy_(saved[key].view(-1)[start : start + each.data.numel()])
        done[key] = start + each.data.numel()
    for name, parameter in into.parameters.items():
        parameter.data.copy_(saved[name])
    into.optimizer.step_count.copy_(source.optimizer.step_count)
    into.optimizer.weights_from_masters()
