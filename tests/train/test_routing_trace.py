"""Expert choices are written to a trace in Megatron-LM's format, one step late, and replayed with any layout."""

import json
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe import build
from megatron_moe.config.exit_codes import DataProblem, EnvironmentProblem
from megatron_moe.config.memory import CudaGraphConfig, MemoryConfig, RecomputeConfig
from megatron_moe.config.model import MTPConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.data.loader import TrainLoader
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe.router import Router
from megatron_moe.moe.routing_trace import RoutingTrace, _cells, _encode
from megatron_moe.moe.token_dispatcher.base import Routing
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.step_supervisor import StepSupervisor
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer
from megatron_moe.train.training_log import TrainingLog
from tests.helpers import tiny
from tests.helpers.eager_graphs import EagerRecorder
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.train.test_overflow import Reports

STEPS, MICROBATCHES, LAYERS, TOKENS = 3, 4, 2, 2 * tiny.SEQ
ONE = ParallelConfig()
EP2 = ParallelConfig(world_size=2, ep=2)
TP2 = ParallelConfig(world_size=2, tp=2, sequence_parallel=True)
NOTES: list[str] = []
ROUTER = tiny.router(score_function="sigmoid", expert_bias=True, bias_update_rate=0.1)


def the_plan(parallel: ParallelConfig = ONE, *, trace: Path | None = None, **changes: Any) -> RunPlan:
    moe = tiny.moe(ROUTER, **changes.pop("moe", {"dispatcher": "alltoall" if parallel.ep > 1 else "local"}))
    model = tiny.model(moe_config=moe, mtp=changes.pop("mtp", None))
    plan = tiny.plan(model=model, parallel=parallel, **changes)
    return replace(plan, logging=replace(plan.logging, moe_routing_trace_path=trace))


def replayed(plan: RunPlan, trace: Path) -> RunPlan:
    return replace(plan, loop=replace(plan.loop, moe_routing_replay_path=trace))


def setup(plan: RunPlan, context: ParallelContext, stack: ExitStack) -> tuple[Trainer, TrainLoader]:
    kernels = reference.bundle()
    trainer = build.build_trainer(plan, context, build.build_model(plan, context, kernels), kernels)
    build.record_steps(trainer, EagerRecorder(), plan.cuda_graphs)
    build.trace_routing(plan, trainer, NOTES.append, stack)
    return trainer, build.build_train_loader(plan, context, build.build_data(plan, context))


def train(
    plan: RunPlan, *, steps: int = STEPS, each: Callable[[int, Trainer], None] = lambda *_: None
) -> list[tuple[Reports, dict[str, Tensor]]]:
    """Reports, and losses and weights, of every rank. `each`: called with the step after it."""

    def run(context: ParallelContext) -> tuple[Reports, dict[str, Tensor]]:
        with ExitStack() as stack:
            trainer, loader = setup(plan, context, stack)
            reports, state, config = Reports(), TrainState(), build.build_train_state_config(plan)
            supervisor = StepSupervisor(trainer, TrainingLog(trainer, reports), loader)
            for step in range(1, steps + 1):
                outcome = supervisor.step(state)
                state.advance(outcome.counts, config)
                supervisor.after_step(outcome)
                each(step, trainer)
            supervisor.catch_up()
            figures = {f"loss {result.iteration}": torch.tensor(result.loss) for result in reports.results}
            figures |= {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
            return reports, figures

    return on_threads(plan.parallel, run) if plan.parallel.world_size > 1 else [run(ParallelContext.single())]


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.glob("*")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def by_place(folder: Path) -> dict[tuple[int, ...], list[list[int]]]:
    """(step, microbatch, layer) -> choices of all tokens, joined from the parts of ranks."""
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for record in sorted(records(folder), key=lambda record: record["part"]):
        found.setdefault((record["step"], record["microbatch"], record["layer"]), []).extend(record["top_indices"])
    return found


GRAPHS = {
    "eager": {},
    "modules": {"cuda_graphs": CudaGraphConfig(cuda_graph_modules=("attn", "moe"), cuda_graph_warmup_steps=1)},
    "whole step": {"cuda_graphs": CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=1)},
    "recompute": {
        "memory": MemoryConfig(recompute=RecomputeConfig(recompute_method="uniform", recompute_num_layers=1))
    },
}


@pytest.mark.parametrize("changes", GRAPHS.values(), ids=GRAPHS)
def test_a_trace_holds_the_choices_of_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Includes the calls of replayed graphs; a recomputed forward is recorded only once."""
    chosen: dict[int, list[list[list[int]]]] = {1: [], 2: []}
    record = Router._record

    def remember(self: Router, metrics: MetricAccumulator, routing: Routing, *others: Any) -> None:
        chosen[self.layer].append(routing.chosen_TK.tolist())
        record(self, metrics, routing, *others)

    monkeypatch.setattr(Router, "_record", remember)
    train(the_plan(trace=tmp_path, **changes))
    found = records(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["router_trace_rank0.jsonl"]
    assert len(found) == STEPS * MICROBATCHES * LAYERS
    assert list(found[0]) == [
        "step", "stage", "block", "layer", "rank", "num_tokens", "topk", "microbatch", "part", "top_indices",
    ]  # fmt: skip
    for layer, expected in chosen.items():
        mine = [each for each in found if each["layer"] == layer + 1]
        assert [each["top_indices"] for each in mine] == expected
        places = [(each["step"], each["microbatch"]) for each in mine]
        assert places == [(step, number) for step in range(1, STEPS + 1) for number in range(MICROBATCHES)]
    fixed = {(r["stage"], r["block"], r["rank"], r["num_tokens"], r["topk"], *r["part"]) for r in found}
    assert fixed == {("pre_dispatch", "decoder", 0, TOKENS, 2, 0, 1)}


def test_a_step_is_written_after_the_next_one_and_tracing_ends(tmp_path: Path) -> None:
    seen = []

    def look(step: int, trainer: Trainer) -> None:
        seen.append(sorted({record["step"] for record in records(tmp_path)}))
        assert len(trainer.routing_trace._steps) <= 2, "bounded host memory"

    NOTES.clear()
    plan = the_plan(trace=tmp_path)
    plan = replace(plan, logging=replace(plan.logging, moe_routing_trace_max_training_iters=3))
    train(plan, steps=5, each=look)
    assert seen == [[], [1], [1, 2], [1, 2, 3], [1, 2, 3]]
    megabytes = 4 * 2 * TOKENS * MICROBATCHES * LAYERS / 1e6
    path = tmp_path / "router_trace_rank0.jsonl"
    assert NOTES == [f"routing trace: about {megabytes:.1f} MB per iteration in {path}"]
    assert path.stat().st_size / 3 == pytest.approx(megabytes * 1e6, rel=1)


@pytest.mark.parametrize("repeated", [False, True])
def test_prediction_layers_have_records_of_their_own(tmp_path: Path, repeated: bool) -> None:
    train(the_plan(trace=tmp_path, mtp=MTPConfig(num_layers=2, repeated_layer=repeated)), steps=1)
    found = [record for record in records(tmp_path) if record["block"] == "mtp"]
    places = sorted((record["microbatch"], record["mtp_idx"]) for record in found)
    assert places == [(microbatch, depth) for microbatch in range(MICROBATCHES) for depth in range(2)]


def test_repeated_steps_are_recorded_once(tmp_path: Path) -> None:
    free, bound = tmp_path / "free", tmp_path / "bound"
    train(the_plan(EP2, trace=free, moe={"dispatcher": "flex"}))
    found = train(the_plan(EP2, trace=bound, moe={"dispatcher": "flex", "expert_rank_capacity_factor": 0.5}))
    assert found[0][0].notes, "no step overflowed"
    for rank in range(2):
        name = f"router_trace_rank{rank}.jsonl"
        assert (bound / name).read_bytes() == (free / name).read_bytes()


LAYOUTS = {
    "one rank": (ONE, {}),
    "alltoall": (EP2, {"moe": {"dispatcher": "alltoall"}}),
    "flex": (EP2, {"moe": {"dispatcher": "flex"}}),
    "flex in graphs": (EP2, {"moe": {"dispatcher": "flex"}, **GRAPHS["modules"]}),
    "sequence parallel": (TP2, {"moe": {"dispatcher": "alltoall"}}),
}


@pytest.mark.parametrize(("parallel", "changes"), LAYOUTS.values(), ids=LAYOUTS)
def test_replays_with_any_layout_equal_one_rank(
    tmp_path: Path, parallel: ParallelConfig, changes: dict[str, Any]
) -> None:
    """The recorded choices were made with other weights, so a router that selected experts itself would give other
    results."""
    source, first, second = (tmp_path / name for name in ("source", "one", "ranks"))
    other = the_plan(trace=source)
    train(replace(other, loop=replace(other.loop, seed=99)))
    ((_, expected),) = train(replayed(the_plan(trace=first), source))
    ((_, native),) = train(the_plan())
    assert not torch.equal(native["loss 1"], expected["loss 1"])
    results = train(replayed(the_plan(parallel, trace=second, **changes), source))
    for rank, (_, found) in enumerate(results):
        same = {name: value for name, value in found.items() if value.shape == expected[name].shape}
        assert "loss 3" in same
        FP64_LAYOUT.check_all(same, {name: expected[name] for name in same}, f"rank {rank}")
    assert by_place(source) == by_place(first) == by_place(second)


def test_a_trace_of_sequence_parallel_ranks_is_replayed_on_one_rank(tmp_path: Path) -> None:
    source, second = tmp_path / "source", tmp_path / "second"
    train(the_plan(TP2, trace=source, moe={"dispatcher": "alltoall"}))
    train(replayed(the_plan(trace=second), source))
    assert by_place(second) == by_place(source)


def test_a_longer_run_starts_the_trace_again(tmp_path: Path) -> None:
    source, second = tmp_path / "source", tmp_path / "second"
    train(the_plan(trace=source), steps=2)
    train(replayed(the_plan(trace=second), source), steps=5)
    recorded, found = by_place(source), by_place(second)
    for (step, microbatch, layer), ids in found.items():
        assert ids == recorded[(step - 1) % 2 + 1, microbatch, layer]


def test_steps_of_different_sizes_are_replayed(tmp_path: Path) -> None:
    """A ramp-up of the batch size, or a schedule of batch sizes, changes the number of microbatches."""
    source, second = tmp_path / "source", tmp_path / "second"
    growing = BatchConfig(micro_batch_size=2, global_batch_size=8, step_sizes=((0, 2), (2, 8)))
    train(the_plan(trace=source, batch=growing))
    train(replayed(the_plan(trace=second, batch=growing), source))
    assert by_place(second) == by_place(source)
    assert {microbatch for step, microbatch, _ in by_place(source) if step == 1} == {0}


def test_megatron_records_without_microbatch_are_read_in_order(tmp_path: Path) -> None:
    source, bare, second = (tmp_path / name for name in ("source", "bare", "second"))
    train(the_plan(EP2, trace=source))
    bare.mkdir()
    for path in source.iterdir():
        lines = [{k: v for k, v in json.loads(line).items() if k not in ("microbatch", "part")} for line in open(path)]
        bare.joinpath(path.name).write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    train(replayed(the_plan(trace=second), bare))
    assert by_place(second) == by_place(source)


def test_traces_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    train(the_plan(trace=source), steps=1)
    path = source / "router_trace_rank0.jsonl"
    text = path.read_text()
    plan = replayed(the_plan(), source)

    def problem(plan: RunPlan, text: str = text) -> str:
        path.write_text(text)
        with pytest.raises(DataProblem) as caught:
            train(plan, steps=1)
        return str(caught.value)

    smaller = replace(plan, batch=replace(plan.batch, micro_batch_size=1))
    assert f"{TOKENS} tokens per microbatch with top-2 were traced, and this run has {TOKENS // 2}" in problem(smaller)
    assert "expert 70 was selected, and this run has 8 experts" in problem(plan, re.sub(r"\[\[ *\d+", "[[70", text))
    assert "no record of layer 3 in step 1" in problem(plan, text.replace('"layer": 3', '"layer": 9'))
    assert "line 2 of" in problem(plan, text.splitlines()[0] + "\nsomething\n")
    assert "the files contain no records of decoder layers" in problem(plan, text.replace('"decoder"', '"mtp"'))
    with pytest.raises(DataProblem, match="no file router_trace_rank"):
        train(replayed(plan, tmp_path), steps=1)


DAMAGES: dict[str, Callable[[str], str]] = {
    "no block": lambda text: text.replace('"block": "decoder", ', "", 1),
    "block of another type": lambda text: text.replace('"block": "decoder"', '"block": 3', 1),
    "no step": lambda text: text.replace('"step": 1, ', "", 1),
    "no layer": lambda text: text.replace('"layer": 2, ', "", 1),
    "text as step": lambda text: text.replace('"step": 1', '"step": "1"', 1),
    "fraction as step": lambda text: text.replace('"step": 1', '"step": 1.5', 1),
    "boolean as layer": lambda text: text.replace('"layer": 2', '"layer": true', 1),
    "step 0": lambda text: text.replace('"step": 1', '"step": 0', 1),
    "steps that are missing": lambda text: text.replace('"step": 1', '"step": 1000000000', 4)[text.index("\n") + 1 :],
    "huge step": lambda text: text.replace('"step": 1', f'"step": 1{"0" * 5000}', 1),
    "negative microbatch": lambda text: text.replace('"microbatch": 0', '"microbatch": -1', 1),
    "microbatches that are missing": lambda text: text.replace('"microbatch": 3', '"microbatch": 2000000000'),
    "part of another type": lambda text: text.replace('"part": [0, 1]', '"part": 0', 1),
    "part with one number": lambda text: text.replace('"part": [0, 1]', '"part": [0]', 1),
    "part beyond its number": lambda text: text.replace('"part": [0, 1]', '"part": [1, 1]', 1),
    "parts that are missing": lambda text: text.replace('"part": [0, 1]', '"part": [0, 1000000]'),
    "too many parts": lambda text: text.replace('"part": [0, 1]', '"part": [0, 1000000000000]', 1),
    "negative number of tokens": lambda text: text.replace(f'"num_tokens": {TOKENS}', '"num_tokens": -1', 1),
    "other number of tokens": lambda text: text.replace(f'"num_tokens": {TOKENS}', f'"num_tokens": {TOKENS + 1}', 1),
    "number of tokens as text": lambda text: text.replace(f'"num_tokens": {TOKENS}', '"num_tokens": "8"', 1),
    "top-k of another record": lambda text: text.replace('"topk": 2', '"topk": 1', 1),
    "top-0": lambda text: text.replace('"topk": 2', '"topk": 0', 1),
    "no top-k": lambda text: text.replace('"topk": 2, ', "", 1),
    "negative id": lambda text: re.sub(r"\[\[ *\d+", "[[-2", text, count=1),
    "id beyond 16 bits": lambda text: re.sub(r"\[\[ *\d+", "[[70000", text, count=1),
    "id of the next number": lambda text: re.sub(r"\[\[ *\d+", "[[8", text, count=1),
    "same expert twice": lambda text: re.sub(r"\[\[ *(\d+), *\d+", r"[[\1,\1", text, count=1),
    "no id": lambda text: re.sub(r"\[\[ *\d+", "[[", text, count=1),
    "minus without number": lambda text: re.sub(r"\[\[ *\d+", "[[-", text, count=1),
    "flat list": lambda text: re.sub(r"\],\[", ",", text),
    "one list is longer": lambda text: text.replace("],[", ",0],[", 1),
    "token without ids": lambda text: re.sub(r"\[\[[^]]*\]", "[[]", text, count=1),
    "nested too deeply": lambda text: text.replace('"rank": 0', '"rank": ' + "[" * 100_000 + "]" * 100_000, 1),
    "list instead of a record": lambda text: '[{"top_indices": [[0,1]]}]\n' + text,
    "repeated record": lambda text: text.splitlines(keepends=True)[0] + text,
    "line cut in the middle": lambda text: text[: len(text) // 2 - 9],
    "last record cut off": lambda text: "".join(text.splitlines(keepends=True)[:-1]),
    "empty": lambda text: "",
    "binary": lambda text: "\x00\x01" * 1000,
}


def test_damaged_traces_are_refused_in_one_sentence(tmp_path: Path) -> None:
    source = tmp_path / "source"
    train(the_plan(trace=source), steps=2)
    path, plan = source / "router_trace_rank0.jsonl", replayed(the_plan(), source)
    context, text = ParallelContext.single(), path.read_text()
    trainer = build.build_trainer(
        plan, context, build.build_model(plan, context, reference.bundle()), reference.bundle()
    )
    plan = replace(plan, loop=replace(plan.loop, train_iters=10**9))
    for name, damage in DAMAGES.items():
        assert damage(text) != text, name
        path.write_text(damage(text))
        sentence = ""
        try:
            build.build_routing_replay(plan, trainer)
        except DataProblem as problem:
            sentence = str(problem)
        assert 0 < len(sentence) < 600 and "\n" not in sentence, f"{name}: {sentence}"
    path.unlink()
    for make in (lambda: path.symlink_to(tmp_path / "other"), lambda: os.mkfifo(path), path.mkdir):
        (tmp_path / "other").write_text(text)
        make()
        with pytest.raises(DataProblem, match="links are not followed|not a regular file|Is a directory"):
            build.build_routing_replay(plan, trainer)
        with pytest.raises(EnvironmentProblem, match="links are not followed|not a regular file|Is a directory"):
            RoutingTrace(source, context, num_experts=8, num_layers=3)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_resumed_run_continues_the_trace(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(the_plan(trace=whole), steps=4)
    train(the_plan(trace=resumed), steps=4)
    path = resumed / "router_trace_rank0.jsonl"
    text, lines = path.read_text(), path.read_text().splitlines(keepends=True)
    stale = resumed / "router_trace_rank5.jsonl"
    per_step = len(lines) // 4
    for kept, left in (("".join(lines[: 3 * per_step]), 2), (text[: len(text) // 2 - 9], 2), (text, 2), (text, 0)):
        path.write_text(kept)
        stale.write_text(text)
        trace = RoutingTrace(resumed, ParallelContext.single(), num_experts=8, num_layers=3)
        trace.begin_step(left + 1)
        trace.close()
        complete = "".join(kept.splitlines(keepends=True)[: left * per_step])
        assert path.read_text() == "".join(line for line in complete.splitlines(keepends=True) if line.endswith("}\n"))
        assert stale.read_text() == "".join(lines[: left * per_step])
    path.write_text(text)

    def run(context: ParallelContext) -> None:
        with ExitStack() as stack:
            plan = the_plan(trace=resumed)
            trainer, loader = setup(plan, context, stack)
            state, config = TrainState(), build.build_train_state_config(plan)
            for _ in range(2):  # as in the run before, without a trace
                loader.next_step()
                state.advance(loader.last_counts, config)
            supervisor = StepSupervisor(trainer, TrainingLog(trainer, Reports()), loader)
            for _ in range(2):
                outcome = supervisor.step(state)
                state.advance(outcome.counts, config)
                supervisor.after_step(outcome)
            supervisor.catch_up()

    run(ParallelContext.single())
    found = [record["step"] for record in records(resumed) if record["rank"] == 0]
    assert found == [record["step"] for record in records(whole)]
    assert path.read_text()[: len("".join(lines[: 2 * per_step]))] == "".join(lines[: 2 * per_step])


def test_a_full_disk_ends_the_trace_but_not_the_run(tmp_path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError("No space left on device")

        def flush(self) -> None: ...
        def close(self) -> None: ...

    def fill(step: int, trainer: Trainer) -> None:
        if step == 2:
            trainer.routing_trace._file = Full()

    ((reports, _),) = train(the_plan(trace=tmp_path), steps=5, each=fill)
    (note,) = reports.notes
    assert note.startswith("iteration 2: the routing trace") and "No space left on device" in note
    assert len(reports.results) == 5
    with pytest.raises(EnvironmentProblem, match="use a folder that can be written"):
        RoutingTrace(Path("/dev/null/x"), ParallelContext.single(), num_experts=4, num_layers=1)


def test_choices_are_encoded_as_json() -> None:
    ids = torch.randint(-1, 300, (7, 5), generator=torch.Generator().manual_seed(1))
    assert json.loads(_encode(ids.to(torch.int16).numpy(), _cells(300))) == ids.tolist()
    assert json.loads(_encode(ids[:0].to(torch.int16).numpy(), _cells(300))) == []
    EXACT.check(torch.tensor(json.loads(_encode(ids.numpy() % 3 - 1, _cells(2)))), ids % 3 - 1, "two experts")
