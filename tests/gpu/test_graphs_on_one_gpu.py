"""CUDA graphs on one GPU: replayed steps equal eager steps bit for bit for any routing."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from arguments.read import read_plan
from benchmarks.harness.timed_run import TimedRun
from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.data.tokenizer import vocab_size_of
from megatron_moe.memory.cuda_graphs.capture import CudaGraphRecorder
from tests.gpu.test_step_on_one_gpu import LAYERS, SMALL
from tests.helpers.tolerances import EXACT

pytestmark = pytest.mark.gpu1

MODULES = [
    ("attn",),
    ("mlp",),
    ("moe_router",),
    ("moe_router", "moe_preprocess"),
    ("moe",),
    ("attn", "mlp", "moe_router", "moe_preprocess"),
    ("attn", "mlp", "moe"),
]
STEPS = 6
REPLAYS = 20


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


WHOLE = ("whole step",)


def train(flags: list[str], modules: tuple[str, ...] = (), num_steps: int = STEPS) -> dict[str, Tensor]:
    """Trains a few steps and returns losses and weights. The routing changes with the weights and the data, and an
    evaluation runs between two replays."""
    plan = read_plan(flags, os.environ, vocab_size_of=vocab_size_of)
    os.environ.update(plan.environment)
    graphs = CudaGraphConfig(
        cuda_graph_modules=() if modules == WHOLE else modules,
        full_iteration=modules == WHOLE,
        cuda_graph_warmup_steps=2,
    )
    run = TimedRun(replace(plan, cuda_graphs=graphs))
    figures: dict[str, Tensor] = {}
    for step in range(num_steps):
        figures[f"loss {step}"] = run.step().loss
        if step == STEPS // 2:
            with torch.no_grad():
                run.trainer.pipeline.run(run.loader.next_step(), lambda output, *_: output.loss_BS.sum())
    recorded = run.trainer.full_iteration or run.trainer.pipeline.graph_instances
    assert (recorded is not None) == bool(modules)
    if recorded is not None:
        assert recorded.summary()
        print("+".join(modules), recorded.summary())
    with run.trainer.optimizer.unquantized_weights():
        figures |= {name: value.detach().clone() for name, value in run.trainer.model.named_parameters()}
    run.close()
    return figures


@pytest.mark.parametrize(
    ("recipe", "routing"), [("q6", "--moe-router-force-load-balancing"), ("m8", "--no-moe-router-force-load-balancing")]
)
def test_replayed_steps_are_bitwise_equal_to_eager_steps(recipe: str, routing: str) -> None:
    flags = ["--recipe", recipe, *SMALL.split(), *LAYERS[recipe].split(), "--lr", "1e-2", "--deterministic-mode"]
    for interval, recorded in (("1", MODULES), ("2", [("attn", "moe_router")])):
        words = [*flags, routing, "--moe-expert-wgrad-interval", interval]
        expected = train(words)
        rerun = train(words)
        EXACT.check_all(rerun, expected, "computed twice")
        for modules in (*recorded, WHOLE):
            EXACT.check_all(train(words, modules), expected, "+".join(modules))


@pytest.mark.parametrize("modules", [("attn", "mlp", "moe"), WHOLE], ids="+".join)
def test_many_replays_are_bitwise_equal_to_eager_steps(modules: tuple[str, ...]) -> None:
    """Weights change between replays."""
    flags = ["--recipe", "m8", *SMALL.split(), *LAYERS["m8"].split(), "--lr", "1e-2", "--deterministic-mode"]
    flags += ["--no-moe-router-force-load-balancing", "--moe-expert-wgrad-interval", "1", "--train-iters", "40"]
    expected = train(flags, num_steps=2 + REPLAYS)
    EXACT.check_all(train(flags, modules, 2 + REPLAYS), expected, "+".join(modules))


def test_graphs_reuse_memory_of_freed_outputs() -> None:
    """Aliases of inputs and outputs do not keep their memory allocated, and replays use the same addresses."""
    recorder, source = CudaGraphRecorder(torch.device("cuda")), torch.ones(2**20, device="cuda")
    pool = recorder.pool()
    first = recorder.capture(lambda: [source * 2], pool)
    first.outputs = list(map(recorder.alias, first.outputs))
    reserved = recorder.pool_bytes([pool])
    second = recorder.capture(lambda given: [given.sum()[None]], pool, [source])
    assert second.inputs[0].data_ptr() == first.outputs[0].data_ptr()
    assert recorder.pool_bytes([pool]) <= reserved + 2**21
    for value in (3.0, 4.0):
        source.fill_(value)
        first.replay()
        assert first.outputs[0].unique().tolist() == [2 * value]
        second.inputs[0].copy_(source)
        second.replay()
        assert second.outputs[0].tolist() == [value * 2**20]
    recorder.destroy()


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """Makes Python collect garbage as often as possible."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*thresholds)


def test_garbage_collection_is_deferred_during_capture(eager_collector: None) -> None:
    """Freeing an unreferenced graph during a capture would invalidate the capture."""
    recorder = CudaGraphRecorder(torch.device("cuda"))
    source = torch.ones(4, device="cuda")

    def work() -> list[Tensor]:
        cycle: list[object] = [torch.cuda.Event(), waste.pop()]
        cycle.append(cycle)
        del cycle
        many = [[number] for number in range(1000)]
        return [source * len(many)]

    waste: list[object] = [recorder.capture(lambda: [source + 1], recorder.pool())]
    recording = recorder.capture(work, recorder.pool())
    recording.replay()
    assert recording.outputs[0].tolist() == [1000.0] * 4


def pool_sizes() -> Counter[tuple[int, int]]:
    """Bytes of all segments of each memory pool of CUDA graphs."""
    sizes: Counter[tuple[int, int]] = Counter()
    for each in torch.cuda.memory_snapshot():
        if tuple(each["segment_pool_id"]) != (0, 0):
            sizes[tuple(each["segment_pool_id"])] += each["total_size"]
    return sizes


@pytest.mark.parametrize("modules", [("attn", "moe_router"), ("attn", "mlp", "moe")], ids="+".join)
def test_pools_do_not_grow_with_microbatches(modules: tuple[str, ...]) -> None:
    """All microbatches of a step replay the same graphs, because one microbatch is in flight at a time."""
    flags = ["--recipe", "m8", *SMALL.split(), *LAYERS["m8"].split(), "--moe-expert-wgrad-interval", "1"]
    found = []
    for number in (2, 4, 8):
        # cuBLAS keeps one workspace per stream in the pools of earlier runs, and each run uses other streams
        torch._C._cuda_clearCublasWorkspaces()
        earlier = pool_sizes().keys()
        plan = read_plan([*flags, "--global-batch-size", f"{2 * number}"], os.environ, vocab_size_of=vocab_size_of)
        graphs = CudaGraphConfig(cuda_graph_modules=modules, cuda_graph_warmup_steps=1)
        run = TimedRun(replace(plan, cuda_graphs=graphs))
        for _ in range(3):
            run.step()
        found.append(sum(size for pool, size in pool_sizes().items() if pool not in earlier))
        run.close()
        del run
        gc.collect()
        torch.cuda.empty_cache()
    print("+".join(modules), "pools in MiB:", [size >> 20 for size in found])
    assert 0 < max(found[1:]) <= 1.05 * found[0]
