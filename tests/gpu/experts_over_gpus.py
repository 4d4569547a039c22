"""Functions that every rank runs in the GPU tests of expert parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.config.model import InitConfig
from megatron_moe.config.moe import CapacityConfig, MoEConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import low_precision_config
from megatron_moe.config.run import KernelConfig
from megatron_moe.config.transport import COPIES, DEEPEP, HIERARCHICAL, SYMMETRIC, ExpertTransport, PushConfig
from megatron_moe.kernels.registry import is_installed, select_kernels
from megatron_moe.model.init import init_parameters
from megatron_moe.moe.moe_layer import MoELayer
from megatron_moe.moe.token_dispatcher.base import PLAIN_ROWS, ExpertComm, Routing, RowFormats, expert_of_each_row
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.precision.carried_copies import carried_grad, plain_grad
from megatron_moe.precision.quantized_tensor import QuantizedTensor, dequantize
from megatron_moe.train.step_results import largest_overflows
from tests.gpu.shared_group import run_within
from tests.helpers import ranks
from tests.helpers.contexts import context_of_rank
from tests.helpers.modules import module_of
from tests.helpers.quantizers import quantizers
from tests.moe.parallel.folded import HIDDEN, Data, folds, make_mb, moe_config, on_one_rank, on_this_rank

BALANCED = {
    "score_function": "sigmoid",
    "expert_bias": True,
    "balancing": ("aux_loss", "seq_aux_loss"),
    "aux_loss_coeffs": (0.3, 0.2),
    "z_loss_coeff": 0.1,
}
LIMIT_S = 240.0
"""Time limit of one job in seconds."""
WIDE = 256
"""Hidden size of layers with FP8 experts, whose kernels multiply blocks of 128."""
ContextOf = Callable[[ParallelConfig, torch.dtype], ParallelContext]
CAPACITIES = (None, CapacityConfig(factor=0.75), CapacityConfig(factor=1.0, pad=True))


def cases(num_ranks: int) -> list[tuple[ParallelConfig, MoEConfig, Data]]:
    """Lists all parallel layouts and dispatchers; optional features rotate over the cases."""
    found = []
    for place, fold in enumerate(folds(num_ranks)):
        for dispatcher in ("allgather", "alltoall"):
            capacity = CAPACITIES[(place + (dispatcher == "alltoall")) % 3]
            router = BALANCED if capacity is None else {}
            config = moe_config(
                dispatcher=dispatcher, router=router, capacity=capacity, bias=True, shared=True, overlap=True
            )
            found.append((fold, config, Data.random(fold.dp, padded=True)))
    return found


def every_case(context_of: ContextOf, num_ranks: int) -> list[Any]:
    results = []
    for fold, config, data in cases(num_ranks):
        ctx = context_of(fold, torch.float64)
        results.append(on_this_rank(ctx, config, fold, data))
    return results


def without_waiting(context_of: ContextOf, num_ranks: int) -> list[Any]:
    """Runs two steps of layers that declare no host read; the second step fails if the host waits for the device."""
    fold = ParallelConfig(world_size=num_ranks, ep=num_ranks)
    ctx = context_of(fold, torch.bfloat16)
    kernels = select_kernels(KernelConfig(), ctx.device, ctx.dtype)
    done = []
    padded = CapacityConfig(factor=1.0, pad=True)
    for dispatcher, capacity in (("allgather", None), ("alltoall", padded), ("flex", None), ("flex", padded)):
        config = moe_config(
            dispatcher=dispatcher, router={"dtype": "fp32"}, capacity=capacity, shared=True, overlap=True
        )
        config = replace(config, push=PushConfig(num_sms=8 if dispatcher == "flex" else None))
        layer = module_of(config, ctx, kernels)
        init_parameters(layer, 5, InitConfig(method="unit_gain"))
        hidden = torch.randn(64, 2, HIDDEN, device=ctx.device).bfloat16()
        for mode in ("default", "error"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            leaf = hidden.detach().requires_grad_()
            layer(leaf, make_mb(leaf, None)).sum().backward()
            torch.cuda.set_sync_debug_mode("default")
        done.append((dispatcher, bool(leaf.grad.isfinite().all())))
    return done


def flex_layers(context_of: ContextOf, num_ranks: int, ranks_per_host: int | None = None) -> list[Any]:
    """Runs layers with every parallel layout, the flex dispatcher and Triton kernels, in fp32."""
    results = []
    for fold, config, data in flex_cases(num_ranks, ranks_per_host):
        ctx = context_of(fold, torch.float32)
        kernels = select_kernels(KernelConfig(), ctx.device, ctx.dtype)
        results.append(on_this_rank(ctx, config, fold, data, kernels=kernels))
    return results


def bf16_layers(context_of: ContextOf, num_ranks: int) -> list[Any]:
    """Runs every layout with the flex dispatcher in bf16, on one host and on two emulated hosts.

    Also returns the result of the local dispatcher on one GPU with the same kernels.
    """
    results = []
    for fold, config, data in bf16_cases(num_ranks):
        ctx = context_of(fold, torch.bfloat16)
        kernels = select_kernels(KernelConfig(), ctx.device, ctx.dtype)
        alone = ParallelContext.single(dtype=ctx.dtype, device=ctx.device)
        expected = on_one_rank(config, data, ctx=alone, kernels=kernels).tensors
        on_host = {name: value.cpu() for name, value in expected.items()}
        results.append((on_this_rank(ctx, config, fold, data, kernels=kernels), on_host))
    return results


def bf16_cases(num_ranks: int) -> list[tuple[ParallelConfig, MoEConfig, Data]]:
    """Lists `flex_cases` on one host and on two, with expert shards whose rows are multiples of 16 bytes for TMA."""
    found = [*flex_cases(num_ranks), *flex_cases(num_ranks, num_ranks // 2)]
    wide = [replace(config, experts=replace(config.experts, ffn_hidden_size=32)) for _, config, _ in found]
    return [(fold, config, data) for (fold, _, data), config in zip(found, wide, strict=True)]


def hierarchical_layers(context_of: ContextOf, num_ranks: int) -> list[Any]:
    """Runs `flex_layers` with expert groups on two hosts."""
    return flex_layers(context_of, num_ranks, num_ranks // 2)


def flex_cases(num_ranks: int, ranks_per_host: int | None = None) -> list[tuple[ParallelConfig, MoEConfig, Data]]:
    """Lists all parallel layouts with the flex dispatcher.

    Overlapped shared experts, reserved SMs, and row bounds that no rank exceeds rotate over the cases.
    """
    found = []
    for place, each in enumerate(folds(num_ranks)):
        fold = replace(each, ranks_per_host=ranks_per_host)
        config = moe_config(dispatcher="flex", router=BALANCED, bias=True, shared=True, overlap=place % 2 == 0)
        config = replace(config, push=PushConfig(num_sms=8 if place % 4 < 2 else None))
        found.append((fold, config, Data.random(fold.dp, padded=True)))
    return found


ROUTINGS: dict[str, Callable[[int, int], list[list[int]]]] = {
    "spread": lambda rank, token: [(rank + 3 * token) % 16, (rank + 5 * token + 7) % 16],
    "all to the last expert": lambda rank, token: [15, -1],
    "first rank sends to the first expert": lambda rank, token: [0, -1] if rank == 0 else [-1, -1],
    "no choice": lambda rank, token: [-1, -1],
    "some choices dropped": lambda rank, token: [(2 * token) % 16 if token % 3 else -1, -1 if token % 2 else 9],
}


def flex_exchanges(context_of: ContextOf, num_ranks: int) -> list[Any]:
    """Dispatches tokens, scales them by expert number and combines them, for several routings and every transport.

    Transports are symmetric memory with kernels and with copy engines, NCCL on one host and on several, and DeepEP (if
    it is installed). Returns (name, output, gradients of tokens and probabilities) and the values expected from a
    formula."""
    results = _exchanges(context_of, num_ranks, SYMMETRIC, (torch.float32, torch.bfloat16))
    results += _exchanges(context_of, num_ranks, COPIES, (torch.float32, torch.bfloat16))
    for ranks_per_host in (None, num_ranks // 2, 1):
        results += _exchanges(context_of, num_ranks, HIERARCHICAL, (torch.float32, torch.bfloat16), ranks_per_host)
    if is_installed("deep_ep"):
        results += _exchanges(context_of, num_ranks, DEEPEP, (torch.bfloat16,))
    return results


def _exchanges(
    context_of: ContextOf,
    num_ranks: int,
    kind: ExpertTransport,
    dtypes: Sequence[torch.dtype],
    ranks_per_host: int | None = None,
) -> list[Any]:
    results = []
    for dtype in dtypes:
        ctx = context_of(ParallelConfig(world_size=num_ranks, ep=num_ranks, ranks_per_host=ranks_per_host), dtype)
        comm = ExpertComm(ctx, select_kernels(KernelConfig(), ctx.device, dtype), kind, 16)
        dispatcher, num_local = comm.new_dispatcher(), 16 // num_ranks
        for repeat, (name, choose) in enumerate(list(ROUTINGS.items()) * 3):
            draw = torch.Generator().manual_seed(100 * ctx.rank + repeat)
            tokens, grad = (torch.randn(96, 64, generator=draw).to(ctx.device, dtype) for _ in range(2))
            ids = torch.tensor([choose(ctx.rank, token) for token in range(96)], device=ctx.device)
            probs = torch.rand(96, 2, generator=draw).to(ctx.device).masked_fill(ids < 0, 0)
            tokens.requires_grad_(), probs.requires_grad_()
            counts = torch.bincount(ids[ids >= 0], minlength=16)
            routing = Routing(num_experts=16, ids_TK=ids, probs_TK=probs, counts_E=counts)
            rows, handle = dispatcher.finish_dispatch(dispatcher.start_dispatch(tokens, routing))
            scale = 1 + ctx.rank * num_local + expert_of_each_row(rows.offsets_e, len(rows.data))
            scaled = (rows.data.float() * (rows.probs_R * scale)[:, None]).to(dtype)
            out = dispatcher.finish_combine(dispatcher.start_combine(replace(rows, data=scaled), handle))
            out.backward(grad)
            weight = (probs * (1 + ids) * (ids >= 0)).double().detach()
            x, g = tokens.detach().double(), grad.double()
            expected = {
                "out": x * weight.sum(1, keepdim=True),
                "tokens": g * weight.sum(1, keepdim=True),
                "probs": (x * g).sum(1, keepdim=True) * (1 + ids) * (ids >= 0),
            }
            actual = {"out": out.detach(), "tokens": tokens.grad, "probs": probs.grad}
            on_host = [{key: value.cpu() for key, value in each.items()} for each in (actual, expected)]
            results.append((f"{kind.name}, {ranks_per_host} ranks per host, {name}, {dtype}", *on_host))
    return results


def flex_bounds(context_of: ContextOf, num_ranks: int) -> list[Any]:
    """Overflow of routings that need exactly as many rows as the bound, or one row more. All tokens select experts on
    the last rank."""
    ctx = context_of(ParallelConfig(world_size=num_ranks, ep=num_ranks), torch.bfloat16)
    kernels, found = select_kernels(KernelConfig(), ctx.device, ctx.dtype), []
    for num_rows in (24, 25):
        comm = ExpertComm(ctx, kernels, SYMMETRIC, 16, row_capacity_factor=24 / 48)
        dispatcher = comm.new_dispatcher()
        ids = torch.full((24, 2), -1, device=ctx.device)
        if ctx.rank == 0:
            ids.view(-1)[:num_rows] = 15 - torch.arange(num_rows, device=ctx.device) % 2
        routing = Routing(
            num_experts=16,
            ids_TK=ids,
            probs_TK=(ids >= 0).float(),
            counts_E=torch.bincount(ids[ids >= 0], minlength=16),
        )
        comm.begin_step()
        rows, _ = dispatcher.finish_dispatch(
            dispatcher.start_dispatch(torch.ones(24, 64, device=ctx.device, dtype=ctx.dtype), routing)
        )
        comm.record_overflow(rows)
        found.append(round(float(largest_overflows(ctx, comm, None)["overflow"]) * 24))
    return found


def flex_replays(context_of: ContextOf, num_ranks: int) -> list[Any]:
    """Checks per transport whether replays of a captured layer with new inputs equal eager execution bit for bit."""
    ctx, found = context_of(ParallelConfig(world_size=num_ranks, ep=num_ranks), torch.bfloat16), []
    kernels = select_kernels(KernelConfig(), ctx.device, ctx.dtype)
    for kind in (SYMMETRIC, COPIES):
        config = replace(moe_config(dispatcher="flex", router={"dtype": "fp32"}), transport_backend=kind.name)
        layer = module_of(config, ctx, kernels)
        init_parameters(layer, 5, InitConfig(method="unit_gain"))
        static = torch.empty(64, 2, HIDDEN, device=ctx.device, dtype=ctx.dtype, requires_grad=True)
        found += eager_and_replayed(layer, static, [static], ctx.rank, 20)[1]
    return found


def flex_fp8_exchanges(context_of: ContextOf, num_ranks: int) -> list[Any]:
    """Exchanges rows in FP8, and in bf16 with quantisation afterwards, for every routing.

    Returns (name, received copies and their values, copies quantised after the exchange) for tokens and for combine's
    gradient, through symmetric memory with kernels and with copy engines, and through DeepEP (if it is installed)."""
    ctx, found = context_of(ParallelConfig(world_size=num_ranks, ep=num_ranks), torch.bfloat16), []
    config = low_precision_config("blockwise", hybrid=True)
    kernels = select_kernels(KernelConfig(), ctx.device, ctx.dtype, config)
    for kind in (SYMMETRIC, COPIES, *((DEEPEP,) if is_installed("deep_ep") else ())):
        comm = ExpertComm(ctx, kernels, kind, 16, options=None if kind is COPIES else PushConfig(num_sms=8))
        for repeat, (name, choose) in enumerate(list(ROUTINGS.items()) * 2):
            draw = torch.Generator().manual_seed(100 * ctx.rank + repeat)
            tokens, grad = (torch.randn(96, 640, generator=draw) * torch.rand(96, 640, generator=draw) for _ in "ab")
            ids = torch.tensor([choose(ctx.rank, token) for token in range(96)], device=ctx.device)
            counts = torch.bincount(ids[ids >= 0], minlength=16)
            probs = (ids >= 0).float()
            routing = Routing(num_experts=16, ids_TK=ids, probs_TK=probs, counts_E=counts)
            copies: list[list[QuantizedTensor | None]] = []
            tensors: list[list[torch.Tensor]] = []
            for quantises in (False, True):
                formats = RowFormats(tokens=config.inputs, grads=config.grads) if quantises else PLAIN_ROWS
                dispatcher = comm.new_dispatcher(formats)
                leaf = tokens.to(ctx.device, ctx.dtype).requires_grad_()
                rows, handle = dispatcher.finish_dispatch(dispatcher.start_dispatch(leaf, routing))
                data = rows.data.detach().requires_grad_()
                out = dispatcher.finish_combine(dispatcher.start_combine(replace(rows, data=data), handle))
                (got,) = torch.autograd.grad(out, data, grad.to(ctx.device, ctx.dtype))
                tensors.append([rows.data.detach(), plain_grad(got)])
                copies.append([rows.quantized, carried_grad(got, config.grads)])
            for place, fmt in enumerate((config.inputs, config.grads)):
                expected = kernels.quantize_rows(tensors[0][place], fmt, rowwise=True, columnwise=False)
                actual = copies[1][place]
                assert actual is not None
                values = dequantize(expected.row_copy, expected.block, torch.float32).to(ctx.dtype)
                pairs = ((actual.row_copy.data.view(torch.uint8), expected.row_copy.data.view(torch.uint8)),)
                pairs += ((actual.row_copy.scales, expected.row_copy.scales), (tensors[1][place], values))
                content = "gradients" if place else "tokens"
                found.append((f"{kind.name}, {content}, {name}", [torch.equal(*pair) for pair in pairs]))
    return found


def fp8_layer(ctx: ParallelContext, *, sent_in_fp8: bool) -> MoELayer:
    """Creates a bf16 layer with FP8 experts and the flex dispatcher."""
    config = low_precision_config("blockwise", weight_grad=False)
    kernels = select_kernels(KernelConfig(), ctx.device, ctx.dtype, config)
    router = {"dtype": "fp32", "hidden_size": WIDE}
    moe = moe_config(dispatcher="flex", router=router, hidden_size=WIDE, ffn_hidden_size=WIDE)
    moe = replace(moe, fp8_dispatch=sent_in_fp8, fp8_combine_grad=sent_in_fp8)
    layer = module_of(moe, ctx, kernels, quantizers=quantizers(config, kernels, device="cuda"))
    init_parameters(layer, 5, InitConfig(method="unit_gain"))
    return layer


def flex_fp8_layers(context_of: ContextOf, num_ranks: int) -> list[Any]:
    """Names of tensors that an FP8 exchange changes, and whether graph replays equal eager execution bit for bit.

    The tensors are those of a layer with FP8 experts."""
    ctx = context_of(ParallelConfig(world_size=num_ranks, ep=num_ranks), torch.bfloat16)
    found, same = [], []
    for sent_in_fp8 in (False, True):
        layer = fp8_layer(ctx, sent_in_fp8=sent_in_fp8)
        static = torch.empty(64, 2, WIDE, device=ctx.device, dtype=ctx.dtype, requires_grad=True)
        parameters = dict(layer.named_parameters())
        eager, same = eager_and_replayed(layer, static, [static, *parameters.values()], ctx.rank, 4)
        found.append(dict(zip(("out", "input", *parameters), eager[-1], strict=True)))
    return [[name for name in found[0] if not torch.equal(found[0][name], found[1][name])], same]


def eager_and_replayed(
    layer: MoELayer, static: torch.Tensor, leaves: Sequence[torch.Tensor], rank: int, num_steps: int
) -> tuple[list[list[torch.Tensor]], list[bool]]:
    """Output and gradients of `leaves` for several contents of the input `static`.

    Also returns whether a captured graph gives the same bits."""

    def step() -> list[torch.Tensor]:
        out = layer(static, make_mb(static, None))
        return [out.detach(), *torch.autograd.grad(out, leaves, static.detach())]

    def fill(number: int) -> None:
        draw = torch.Generator(static.device).manual_seed(10 * number + rank)
        static.data.copy_(torch.randn(static.shape, device=static.device, generator=draw))

    eager = []
    for number in range(num_steps):
        fill(number)
        eager.append([each.clone() for each in step()])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outputs = step()
    same = []
    for number, expected in enumerate(eager):
        fill(number)
        graph.replay()
        same.append(all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)))
    return eager, same


MODULES = {
    "eager": (),
    "moe": ("moe",),
    "all modules": ("attn", "mlp", "moe"),
    "all modules, bounded rows": ("attn", "mlp", "moe"),
    "whole step": None,
    "whole step, bounded rows": None,
}
SMALL_STEPS = (
    "--num-layers 3 --hidden-size 256 --moe-ffn-hidden-size 128 --num-experts 16 --moe-router-topk 4 --seq-length 256 "
    "--vocab-size 1000 --global-batch-size 8 --micro-batch-size 2 --train-iters 30 --moe-layer-freq ([0]+[1]*2) "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type flex --no-moe-router-force-load-balancing "
    "--moe-expert-wgrad-interval 1 --lr 1e-2 --deterministic-mode --no-overlap-grad-reduce --no-overlap-param-gather"
)


def trained(context: ParallelContext, recipe: str, name: str, num_steps: int) -> tuple[dict[str, torch.Tensor], int]:
    """Trains and returns (losses and final weights, number of repeated steps). The first two steps are eager."""
    bound = ["--moe-expert-rank-capacity-factor", "0.9" if name.endswith("bounded rows") else "2"]
    modules = MODULES[name]
    graphs = CudaGraphConfig(
        cuda_graph_modules=modules or (), full_iteration=modules is None, cuda_graph_warmup_steps=2
    )
    run = run_within(context, ["--recipe", recipe, *SMALL_STEPS.split(), *bound], graphs)
    figures, num_repeated = {}, 0
    for step in range(num_steps):
        outcome = run.step()
        while overflow := float(outcome.extra_scalars.get("overflow", 0)):
            num_repeated += 1
            (retained,) = run.trainer.prepare_repetition(outcome.iteration, overflow)
            outcome = run.trainer.step(retained.batches, retained.state)
        figures[f"loss {step}"] = outcome.loss.cpu()
    recorded = run.trainer.full_iteration or run.trainer.pipeline.graph_instances
    assert (recorded is None) == name.startswith("eager")
    if recorded is not None:
        print(name, recorded.summary(), flush=True)
    figures |= {name: value.detach().cpu() for name, value in run.trainer.model.named_parameters()}
    run.close()
    return figures, num_repeated


def on_rank(context: ParallelContext, job: Callable[..., list[Any]], num_ranks: int) -> list[Any]:
    """Runs `job` with contexts of any layout in the process group of `context`; returns its results."""

    def context_of(config: ParallelConfig, dtype: torch.dtype) -> ParallelContext:
        return context_of_rank(config, context.rank, device=context.device, dtype=dtype, handles=context.handles)

    return job(context_of, num_ranks)


def on_gpus(num_ranks: int, job: Callable[..., list[Any]]) -> list[list[Any]]:
    """Runs `job` in one process per GPU; returns the results of every rank."""
    return ranks.on_gpus(ParallelConfig(world_size=num_ranks), on_rank, job, num_ranks, timeout=LIMIT_S)
