"""Gradient buffers, norm, clipping and AdamW on one GPU equal those on the CPU, without host-device synchronisation.

Checkpoints of the optimizer are tested as well.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_moe.checkpoint.load import find_checkpoint, load_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import TensorShard, tensor_key
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.ops import AdamWState
from megatron_moe.optim.clip_grads import clip_coefficient, count_zeros, gradient_norms
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import finish_grads
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.precision.optimizer_state import PackedState
from tests.helpers.kernel_comparison import OVERFLOWS, adamw_step, check_nonfinite_flag
from tests.helpers.optim_parameters import BF16, FP64, make_buffers, make_gradients, make_parameters
from tests.helpers.tolerances import EXACT, FP64_LAYOUT, FP64_REF

pytestmark = pytest.mark.gpu1


def _train(
    device: str, *, num_steps: int = 3, precision=FP64, rule: str = "adam"
) -> tuple[dict[str, Tensor], Optimizer, dict[str, Tensor]]:
    """Runs steps with given gradients; returns weights, the optimizer and the last step's results."""
    context = ParallelContext.single(device=device)
    dtype = torch.float64 if precision is FP64 else torch.bfloat16
    parameters = make_parameters(dtype)
    for parameter in parameters.values():
        parameter.data = parameter.data.to(device)
    buffers = make_buffers(parameters, precision, context, optimizer=OptimizerConfig(optimizer=rule))
    optimizer = Optimizer(buffers, precision)
    gradients = [{name: g.to(device) for name, g in make_gradients(step).items()} for step in range(2 * num_steps)]
    tokens = torch.full((), 7.0, device=device)
    apply_update = torch.ones((), dtype=torch.bool, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(num_steps):
            buffers.begin_step()
            for microbatch in range(2):
                for name, parameter in parameters.items():
                    parameter.grad = gradients[2 * step + microbatch][name].to(dtype)
                buffers.collect_autograd_grads()
            finish_grads(buffers, context, token_count=tokens)
            norms = gradient_norms(buffers, context)
            scale = clip_coefficient(norms["all"], 0.5)
            optimizer.step(
                lr=0.01, weight_decay=0.1, grad_scale=scale, apply_update=apply_update & torch.isfinite(norms["all"])
            )
        report = {**norms, "zeros": count_zeros(buffers), "weights": optimizer.params_norm()}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {name: parameter.detach() for name, parameter in parameters.items()}, optimizer, report


@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_optimizer_steps_match_the_cpu_without_host_sync(rule: str) -> None:
    on_gpu, _, gpu_report = _train("cuda", rule=rule)
    on_cpu, _, cpu_report = _train("cpu", rule=rule)
    # Muon's Newton-Schulz iterations amplify rounding errors in directions of small singular values
    tolerance = FP64_REF if rule == "adam" else FP64_LAYOUT
    tolerance.check_all({name: w.cpu() for name, w in on_gpu.items()}, on_cpu, "weights")
    tolerance.check_all({name: value.cpu() for name, value in gpu_report.items()}, cpu_report, "report")


def test_checkpoints_from_the_gpu_are_restored_bitwise(tmp_path: Path) -> None:
    weights, optimizer, _ = _train("cuda", precision=BF16)
    tensors = {tensor_key("model", name): weight for name, weight in weights.items()}
    tensors |= {tensor_key(each.kind, each.name): each.whole for each in optimizer.named_state()}
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    context = ParallelContext.single(device="cuda")
    saved = {key: TensorShard.whole(tensor) for key, tensor in tensors.items()}
    CheckpointSaver(tmp_path, context, say=lambda line: None).save(3, saved, {})
    for tensor in tensors.values():
        tensor.zero_()
    load_checkpoint(find_checkpoint(CheckpointConfig(save=tmp_path), context), saved, context)
    EXACT.check_all({k: t.cpu() for k, t in tensors.items()}, {k: t.cpu() for k, t in expected.items()}, "tensors")


@pytest.mark.parametrize("ops", [triton_kernels, torch_native], ids=["triton", "torch_native"])
@pytest.mark.parametrize("what", OVERFLOWS)
def test_nonfinite_values_set_the_flag(what: str, ops) -> None:
    check_nonfinite_flag(ops, what, "cuda")


@pytest.mark.parametrize(
    "formats", [("remainder", "fp8", "fp16"), ("fp16", "fp16", "fp8"), ("plain", "plain", "plain")], ids="-".join
)
def test_captured_steps_set_the_nonfinite_flag(formats: tuple[str, str, str]) -> None:
    """The Triton kernel sets the flag without host-device synchronisation, and the flag then stays set."""
    size, device = 5000, torch.device("cuda")
    roots = (False, False, True)
    states = [
        PackedState.zeros(size, name, torch.float32, device, root=root and name != "plain")
        for name, root in zip(formats, roots, strict=True)
    ]
    weights, grad = torch.ones(size, device=device).bfloat16(), torch.ones(size, device=device)
    if formats[0] == "plain":
        states[0].data.fill_(1.0)
    move = adamw_step(1, scale=1.0, device=device)
    state = AdamWState(*states)

    def step() -> None:
        triton_kernels.adamw_packed_(state, grad, move, weights)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number, (last, expected) in enumerate([(1.0, False), (torch.nan, True), (1.0, True)]):
        grad[-1] = last
        graph.replay()
        assert bool(move.nonfinite) == expected, f"replay {number}"


@pytest.mark.parametrize("shape", [(2, 1408, 2048), (3, 576, 2048), (1, 300, 1000), (2, 64, 2048)])
@pytest.mark.parametrize("transposed", [False, True])
def test_syrk_on_tensor_cores(shape: tuple[int, int, int], transposed: bool) -> None:
    number, size, depth = shape
    x = torch.randn(number, depth, size, device="cuda").bfloat16().mT
    x = x if transposed else x.contiguous()
    gram = triton_kernels.syrk(x)
    polynomial = triton_kernels.syrk(gram, gram, -4.0, 0.01)
    expected = x.double() @ x.double().mT
    exact = 0.01 * gram.double() @ gram.double() - 4 * gram.double()
    for found, right in ((gram, expected), (polynomial, exact)):
        error = (found.double() - right).abs() / (right.abs() + right.abs().mean())
        assert error.max() < 2**-7, f"{error.max():.5f}"
        EXACT.check(found, found.mT.contiguous(), "symmetry")
