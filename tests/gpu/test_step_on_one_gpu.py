"""Whole training steps on one GPU: no host-device synchronisation, and bitwise reproducible results."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from arguments.read import read_plan
from benchmarks.harness.timed_run import TimedRun
from megatron_moe import build
from megatron_moe.data.tokenizer import vocab_size_of
from megatron_moe.logs.timers import Timers
from tests.gpu.host_sync import no_host_sync
from tests.helpers.tolerances import EXACT, FP32_MODEL

pytestmark = pytest.mark.gpu1

SMALL = (
    "--num-layers 3 --hidden-size 256 --moe-ffn-hidden-size 128 --num-experts 16 --moe-router-topk 4 --seq-length 256 "
    "--vocab-size 1000 --global-batch-size 4 --micro-batch-size 2 --train-iters 20"
)
LAYERS = {"q6": "--moe-layer-freq 1", "m8": "--moe-layer-freq [0,1,1]"}


@pytest.fixture(params=["q6", "m8"])
def flags(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    yield ["--recipe", request.param, *SMALL.split(), *LAYERS[request.param].split()]
    torch.use_deterministic_algorithms(False)


def start(flags: list[str]) -> TimedRun:
    plan = read_plan(flags, os.environ, vocab_size_of=vocab_size_of)
    os.environ.update(plan.environment)
    return TimedRun(plan)


@pytest.mark.parametrize(
    "routing",
    ["--moe-router-force-load-balancing", "--no-moe-router-force-load-balancing", "--moe-router-force-skew=3"],
)
@pytest.mark.parametrize(
    "update",
    [
        (),
        ("--overlap-optimizer-step",),
        ("--overlap-optimizer-step", "--optimizer", "muon", "--log-max-attention-logit"),
    ],
    ids=["", "updates in the forward", "muon and largest logits"],
)
def test_steps_run_without_host_sync(flags: list[str], routing: str, update: tuple[str, ...]) -> None:
    run = start([*flags, routing, *update])
    timers = run.trainer.timers = Timers(2, run.trainer.context.device)
    for _ in range(2):
        run.step()
    batches = run.loader.next_step()
    with no_host_sync():
        outcome = run.trainer.step(batches, run.state)
        early = timers.gather_seconds(run.trainer.context)  # has all steps if the device has already finished them
    assert torch.isfinite(outcome.loss)
    torch.cuda.synchronize()
    times = timers.gather_seconds(run.trainer.context) or early
    parts = [times[f"{node}-{way}"][0] for node in ("attention", "experts") for way in ("forward", "backward")]
    assert min(parts) > 0 and sum(parts) < times["forward-backward"][0]
    run.close()


def test_traced_and_replayed_steps_run_without_host_sync(flags: list[str], tmp_path: Path) -> None:
    """The replay selects the recorded experts although its logits differ."""
    learned = [*flags, "--no-moe-router-force-load-balancing"]
    traces = []
    for words in ((), ("--moe-routing-replay-path", str(tmp_path / "0"), "--moe-router-force-skew", "3")):
        folder = tmp_path / str(len(traces))
        with ExitStack() as stack:
            run = start([*learned, *words, "--moe-routing-trace-path", str(folder)])
            build.trace_routing(run.plan, run.trainer, print, stack)
            for _ in range(2):
                run.step()
            batches = run.loader.next_step()
            with no_host_sync():
                outcome = run.trainer.step(batches, run.state)
            assert torch.isfinite(outcome.loss)
            assert [run.trainer.routing_trace.write(iteration) for iteration in (1, 2, 3)] == [None] * 3
            run.close()
        traces.append((folder / "router_trace_rank0.jsonl").read_bytes())
    assert traces[0] == traces[1] and traces[0].count(b"\n") >= 3 * 2 * 2, "steps, microbatches, layers"


@pytest.mark.parametrize("interval", [2, 3, 6])
def test_batched_expert_weight_gradients_match_separate_ones(flags: list[str], interval: int) -> None:
    """Compares the gradients of one step of five microbatches."""
    found = []
    for number in (1, interval):
        more = ["--global-batch-size", "10", "--deterministic-mode", "--moe-expert-wgrad-interval", str(number)]
        run = start([*flags, *more])
        run.step()
        found.append({each.name: each.main_grad.clone() for each in run.trainer.buffers.main_grads})
        run.close()
    FP32_MODEL.check_all(found[1], found[0], "gradients")


@pytest.mark.parametrize("changes", [(), ("--overlap-optimizer-step",)], ids=["same", "updates in the forward"])
def test_deterministic_runs_are_bitwise_reproducible(flags: list[str], changes: tuple[str, ...]) -> None:
    weights = []
    for others in ((), changes):
        run = start([*flags, "--deterministic-mode", *others])
        for _ in range(3):
            run.step()
        run.trainer.optimizer.finish_gather()
        weights.append({name: value.detach().clone() for name, value in run.trainer.model.named_parameters()})
        run.close()
    for name, value in weights[0].items():
        EXACT.check(weights[1][name], value, name)
