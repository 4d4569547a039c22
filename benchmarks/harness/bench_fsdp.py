"""Times sharded weights and gradients, Muon and QK-clip on two GPUs, and a dense layer stack under torch FSDP2.

    torchrun --nproc-per-node 2 benchmarks/harness/bench_fsdp.py [--cases m27-zero3 m27-qk-clip ...] \
        [--output-dir benchmarks]

Writes `<date>-<machine>-fsdp-muon.md` after every case, with step times, TFLOP/s by Megatron's formula, the measured
peak memory and the peak memory that the dry run predicts; a second call on the same day writes
`<date>-<machine>-fsdp-muon-2.md`. Most cases are compared with a baseline, which runs in the same call even if it is
not selected. Every case runs in processes of its own, so a failure becomes a row of the table and does not affect
later cases; the exit code is then 1. Weights are initialised on the device. Without torchrun, the first of two
ranks is timed alone: its communication takes no time, but its memory is that of a rank of two. `--tiny` runs small
models with the same settings on the CPU, where memory is not measured.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from benchmarks.harness.step_cases import EP2, MUON  # noqa: E402
from benchmarks.harness.timed_run import Marks, TimedRun, context_without_peers, plan_to_run, require_gpu, timed_steps  # noqa: E402
from megatron_moe.config.attention import AttentionConfig  # noqa: E402
from megatron_moe.config.exit_codes import ExitCode, RunError  # noqa: E402
from megatron_moe.config.mlp import MLPConfig  # noqa: E402
from megatron_moe.config.run import RunPlan  # noqa: E402
from megatron_moe.cost_model.flops import flops_per_step  # noqa: E402
from megatron_moe.cost_model.memory import RankMemory, rank_with_peak_memory  # noqa: E402
from megatron_moe.optim.unit_shards import UnitBuffer  # noqa: E402
from tools._common import tool_parser  # noqa: E402

_BATCH = "--micro-batch-size 4 --moe-expert-wgrad-interval 1"
_MODELS = {
    **{name: f"{flags} --expert-model-parallel-size 1 {_BATCH}" for name, flags in EP2.items()},
    "dense": (
        "--recipe q24 --num-layers 16 --num-experts 0 --hidden-size 4096 --ffn-hidden-size 14336 "
        "--num-attention-heads 32 --num-query-groups 32 --kv-channels 128 --no-qk-layernorm --vocab-size 32000 "
        "--expert-model-parallel-size 1 --moe-token-dispatcher-type alltoall --micro-batch-size 1"
    ),
}
_TINY = (
    "--config scripts/recipes/parts/transformer.yaml --mock-data --tokenizer-type NullTokenizer --vocab-size 512 "
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --train-iters 100 --lr 1e-4 --bf16 --device cpu --micro-batch-size 1"
)
_TINY_MOE = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall"
_ZERO_1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_ZERO_3 = "--use-megatron-fsdp"
_ZERO_2 = f"{_ZERO_3} --data-parallel-sharding-strategy optim_grads --global-batch-size 32"
_BY_NCCL = "--fsdp-reduce-backend nccl"
_MILLION = "--global-batch-size 256"
"""1,048,576 tokens a step."""
_CASE_TIMEOUT_S = 240.0
"""Time limit of one case in seconds, including the startup of its processes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    """Name; its first part is a key of `_MODELS`."""
    title: str
    flags: str
    """Flags in addition to those of the model."""
    baseline: str = ""
    """Name of an earlier case. The report divides this case's step time by that of the baseline."""
    must: str = ""
    """Largest allowed ratio of the step times."""
    aim: str = ""
    """Desired ratio of the step times."""
    steps: int = 8
    torch_fsdp2: bool = False
    """Whether the case times a layer stack of these shapes under torch FSDP2 instead."""

    def words(self, *, tiny: bool) -> list[str]:
        """Arguments of pretrain_moe.py."""
        model = self.name.partition("-")[0]
        flags = (
            f"{_TINY} {_TINY_MOE if model != 'dense' else ''} {self.flags}"
            if tiny
            else f"{_MODELS[model]} {self.flags}"
        )
        return [*shlex.split(flags), *(["--global-batch-size", "8"] if tiny else [])]


def _model_cases(model: str) -> tuple[Case, ...]:
    base, title = f"{model}-zero1", model.upper()
    against = partial(Case, baseline=base, must="1.06", aim="1.02")
    return (
        Case(name=base, title=f"{title}, ZeRO-1", flags=f"{_ZERO_1} --global-batch-size 32"),
        against(name=f"{model}-zero3", title=f"{title}, ZeRO-3", flags=f"{_ZERO_3} --global-batch-size 32"),
        against(
            name=f"{model}-buffers",
            title=f"{title}, ZeRO-3, double buffer",
            flags=f"{_ZERO_3} --fsdp-double-buffer --global-batch-size 32",
        ),
        against(
            name=f"{model}-bf16",
            title=f"{title}, ZeRO-3, double buffer, gradients reduced in bf16",
            flags=f"{_ZERO_3} --fsdp-double-buffer --megatron-fsdp-grad-comm-dtype bf16 --global-batch-size 32",
        ),
        against(
            name=f"{model}-bf16-nccl",
            title=f"{title}, ZeRO-3, double buffer, gradients reduced in bf16 by NCCL",
            flags=(
                f"{_ZERO_3} --fsdp-double-buffer --megatron-fsdp-grad-comm-dtype bf16 {_BY_NCCL} --global-batch-size 32"
            ),
        ),
        Case(name=f"{model}-zero2", title=f"{title}, ZeRO-2", flags=_ZERO_2, baseline=base),
        Case(
            name=f"{model}-zero2-nccl",
            title=f"{title}, ZeRO-2, gradients reduced by NCCL",
            flags=f"{_ZERO_2} {_BY_NCCL}",
            baseline=base,
        ),
    )


CASES = (
    *_model_cases("m27"),
    *_model_cases("q24"),
    Case(name="dense-torch", title="dense stack, torch FSDP2", flags="--global-batch-size 8", torch_fsdp2=True),
    Case(
        name="dense-zero3",
        title="dense stack, ZeRO-3",
        flags=f"{_ZERO_3} --global-batch-size 8",
        baseline="dense-torch",
        must="1.00",
        aim="0.91",
    ),
    Case(name="m27-1m", title="M27, AdamW, 1,048,576 tokens", flags=f"{_ZERO_1} {_MILLION}", steps=2),
    Case(
        name="m27-1m-muon",
        title="M27, Muon, 1,048,576 tokens",
        flags=f"{_ZERO_1} {_MILLION} {MUON}",
        baseline="m27-1m",
        must="1.05",
        aim="1.02",
        steps=2,
    ),
    Case(
        name="m27-qk-clip",
        title="M27, ZeRO-1, QK-clip",
        flags=f"{_ZERO_1} --global-batch-size 32 --qk-clip",
        baseline="m27-zero1",
        must="1.005",
        aim="1.00",
    ),
)


BY_NAME = {case.name: case for case in CASES}


def with_baselines(names: Sequence[str]) -> list[Case]:
    """The named cases and their baselines, in the order of `CASES`."""
    wanted = set(names) | {BY_NAME[name].baseline for name in names}
    return [case for case in CASES if case.name in wanted]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Result of a case."""

    step_ms: tuple[float, ...]
    tflops: float
    """TFLOP/s per GPU by Megatron's formula, at the median step."""
    peak_mib: float
    """Largest allocation after the warm-up; 0 without a GPU."""
    closed_mib: float = 0.0
    """Peak of the dry run; 0 for torch FSDP2."""

    @property
    def median_ms(self) -> float:
        return sorted(self.step_ms)[len(self.step_ms) // 2]


class Layer(nn.Module):
    """Transformer layer without biases."""

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.fc1, self.fc2 = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        batch, length, hidden = x_BSH.shape
        qkv = self.qkv(self.norms[0](x_BSH)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x_BSH = x_BSH + self.proj(out.transpose(1, 2).reshape(batch, length, hidden))
        gate, up = self.fc1(self.norms[1](x_BSH)).chunk(2, dim=-1)
        return x_BSH + self.fc2(F.silu(gate) * up)


class Stack(nn.Module):
    """Embedding, layers and output layer; returns the mean loss."""

    def __init__(self, layers: int, hidden: int, ffn: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, ffn, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSH = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH)
        logits = self.head(self.norm(x_BSH))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens_BS.flatten())


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_mib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0


def shared_mib(run: TimedRun) -> float:
    """Size of weight shards and receive buffers in symmetric memory, which torch's allocator does not count; 0 if the
    other rank does not exist, because this memory then comes from the allocator."""
    if run.context.is_fake:
        return 0.0
    memory = sum(each.nbytes for each in run.trainer.buffers.reducer.memory)
    buffers = [each for each in run.trainer.buffers.buffers if isinstance(each, UnitBuffer) and each.shared]
    return (memory + sum(shard.nbytes for buffer in buffers for shard in buffer.weight_shards)) / 2**20


def num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def measured_case(case: Case, *, tiny: bool, warmup: int) -> Measurement:
    """Times a case for which this process is one of the ranks."""
    plan = plan_to_run(case.words(tiny=tiny), 2 - num_processes())
    number = min(case.steps, 2) if tiny else case.steps
    run = measured_torch_fsdp2 if case.torch_fsdp2 else measured
    return run(plan, min(warmup, number), number)


def measured(plan: RunPlan, warmup: int, steps: int) -> Measurement:
    """Times the steps of a run, of which this process may be the only rank."""
    device = "cpu" if plan.device == "cpu" else "cuda:0"
    peers = num_processes() == plan.parallel.world_size
    run = TimedRun(plan, quick=True, context=None if peers else context_without_peers(plan, device))
    try:
        timed_steps(run, warmup)
        reset_peak(run.context.device)
        times, _ = timed_steps(run, steps)
        peak, num_samples = peak_mib(run.context.device) + shared_mib(run), run.num_samples
    finally:
        run.close()
    closed = rank_with_peak_memory(RankMemory(plan).all_ranks()).total / 2**20
    return Measurement(step_ms=tuple(times), tflops=_tflops(plan, num_samples, times), peak_mib=peak, closed_mib=closed)


def measured_torch_fsdp2(plan: RunPlan, warmup: int, steps: int) -> Measurement:
    """Times a dense stack of the plan's shapes under torch FSDP2: weights in bf16 for computation, fp32 master weights
    and fused AdamW; layers are compiled."""
    on_gpu = plan.device != "cpu"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        torch.manual_seed(1)
        mixer, feed_forward = plan.model.layers[0].mixer, plan.model.layers[0].feed_forward
        assert isinstance(mixer, AttentionConfig) and isinstance(feed_forward, MLPConfig), "the stack is dense"
        with device:
            stack = Stack(
                len(plan.model.layers),
                plan.model.hidden_size,
                feed_forward.ffn_hidden_size,
                mixer.num_heads,
                plan.model.vocab_size,
            )
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for each in stack.layers:
            if on_gpu:
                each.compile()
            fully_shard(each, mp_policy=policy)
        fully_shard(stack, mp_policy=policy)
        optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-5, fused=True)
        size = plan.batch.micro_batch_size, plan.data.seq_length
        tokens_BS = torch.randint(plan.model.vocab_size, size, device=device)

        def run(number: int) -> list[float]:
            marks = Marks(device)
            for _ in range(number):
                for _ in range(plan.num_microbatches):
                    (stack(tokens_BS) / plan.num_microbatches).backward()
                torch.nn.utils.clip_grad_norm_(stack.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                marks.add()
            return marks.milliseconds()

        run(warmup)
        reset_peak(device)
        times = run(steps)
        peak = peak_mib(device)
    finally:
        dist.destroy_process_group()
    return Measurement(step_ms=tuple(times), tflops=_tflops(plan, plan.batch.global_batch_size, times), peak_mib=peak)


def _tflops(plan: RunPlan, num_samples: int, times: Sequence[float]) -> float:
    flops = flops_per_step(plan.model, num_samples, plan.data.seq_length)
    return flops / sorted(times)[len(times) // 2] / plan.parallel.world_size / 1e9


COLUMNS = (
    "case", "ms per step (minimum, maximum)", "TFLOP/s", "over", "ratio", "must", "aim", "peak MiB", "closed form MiB",
    "peak over closed form",
)  # fmt: skip


def row(case: Case, found: Measurement | str, done: dict[str, Measurement]) -> str:
    """Formats a case as a table row. `found`: result, or why there is none. `done`: results of earlier cases."""
    if isinstance(found, str):
        return f"| {case.title} | {found} |" + " |" * (len(COLUMNS) - 2)
    times, base = sorted(found.step_ms), done.get(case.baseline)
    ratio = f"{found.median_ms / base.median_ms:.3f}" if base else "not measured" if case.baseline else ""
    cells = (
        case.title,
        f"{found.median_ms:.1f} ({times[0]:.1f}, {times[-1]:.1f})",
        f"{found.tflops:.1f}",
        case.baseline,
        ratio,
        case.must,
        case.aim,
        f"{found.peak_mib:,.0f}" if found.peak_mib else "",
        f"{found.closed_mib:,.0f}" if found.closed_mib else "",
        f"{found.peak_mib / found.closed_mib:.4f}" if found.peak_mib and found.closed_mib else "",
    )
    return f"| {' | '.join(cells)} |"


def report(rows: Sequence[str], cases: Sequence[Case], machine: str, command: str, *, tiny: bool) -> str:
    """Formats the benchmark's Markdown document."""
    head = (
        f"{date.today()}, torch {torch.__version__}, `{command}`. bf16, weights drawn on the device. The median of the "
        "timed steps is reported. TFLOP/s per GPU by Megatron's formula, also for torch FSDP2. Peak: largest "
        "allocation after the warm-up, and weight shards in symmetric memory. Ratio: step time over that of the "
        "case in the column before. "
        + ("The first of two ranks runs alone: its communication takes no time. " if num_processes() == 1 else "")
    )
    lines = [f"# FSDP and Muon on {machine}", "", *textwrap.wrap(head, 120, break_on_hyphens=False), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows]
    lines += ["", "Flags of the cases, for `pretrain_moe.py`:", ""]
    lines += [f"- {case.title}: `{shlex.join(case.words(tiny=tiny))}`" for case in cases]
    return "\n".join(lines) + "\n"


def outcomes(
    cases: Sequence[Case],
    *,
    measure: Callable[[Case], Measurement | str],
    write: Callable[[Sequence[str], Sequence[Case]], None],
) -> bool:
    """Runs the cases in order and calls `write(rows, cases)` after each one. Returns whether all were measured.

    `measure` returns the reason if there is no measurement.
    """
    rows: list[str] = []
    done: dict[str, Measurement] = {}
    for index, case in enumerate(cases, start=1):
        found = measure(case)
        if isinstance(found, Measurement):
            done[case.name] = found
        rows.append(row(case, found, done))
        write(rows, cases[:index])
    return len(done) == len(cases)


def in_new_processes(words: Sequence[str], result: Path, timeout_s: float) -> Measurement | str:
    """Runs a command whose processes call `write_result` with `result`. Returns their measurement, or the reason why
    there is none."""
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its processes
            process.communicate()
            return f"failed: no result after {timeout_s:g} s"
    if process.returncode:
        print(errors[-3000:], file=sys.stderr)
    found = json.loads(result.read_text()) if result.exists() else None
    if isinstance(found, str):
        return found
    if found is None or process.returncode:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        return _in_a_cell(f"failed: exit code {process.returncode}: {last}")
    return Measurement(**found | {"step_ms": tuple(found["step_ms"])})


def write_result(path: Path, measure: Callable[[], Measurement]) -> ExitCode:
    """Writes the measurement of rank 0, or the first failure of a rank, as JSON to `path`."""
    try:
        found = measure()
    except (RunError, RuntimeError, AssertionError, OSError, TypeError, ValueError) as error:
        with suppress(FileExistsError), path.open("x") as file:  # later failures are consequences of the first
            json.dump(_in_a_cell(f"failed: {type(error).__name__}: {error}"), file)
        raise
    if os.environ.get("RANK", "0") == "0":
        path.write_text(json.dumps(asdict(found)))
    return ExitCode.OK


def _in_a_cell(text: str) -> str:
    return " ".join(text.split())[:300].replace("|", "\\|")


def first_free(path: Path) -> Path:
    """`path`, or the first of `NAME-2.md`, `NAME-3.md`, ... that does not exist."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def main(argv: list[str]) -> int:
    parser = tool_parser(__doc__)
    names = [case.name for case in CASES]
    compared = ", ".join(f"{case.name} (over {case.baseline})" if case.baseline else case.name for case in CASES)
    parser.add_argument("--cases", nargs="+", metavar="NAME", choices=names, default=names, help=compared)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks"))
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--result", type=Path, help="internal: times one case in this process; file of the result")
    options: argparse.Namespace = parser.parse_args(argv)
    if options.result:
        (case,) = (BY_NAME[name] for name in options.cases)
        return write_result(options.result, lambda: measured_case(case, tiny=options.tiny, warmup=options.warmup))
    if int(os.environ.get("RANK", "0")):
        return ExitCode.OK  # rank 0 starts the processes of every case
    try:
        if not options.tiny:
            require_gpu("steps on GPUs are")
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    size, alone = num_processes(), num_processes() == 1
    machine = f"{size} CPU ranks" if options.tiny else f"{size}x{torch.cuda.get_device_name().replace('NVIDIA ', '')}"
    chosen = [case for case in with_baselines(options.cases) if not (alone and case.torch_fsdp2)]
    words = ["python"] if alone else ["torchrun", "--nproc-per-node", f"{size}"]
    words += ["benchmarks/harness/bench_fsdp.py"]
    words += [
        *(["--tiny"] if options.tiny else []),
        *([] if len(chosen) == len(CASES) else ["--cases", *options.cases]),
    ]
    options.output_dir.mkdir(parents=True, exist_ok=True)
    path = first_free(options.output_dir / f"{date.today()}-{machine.lower().replace(' ', '-')}-fsdp-muon.md")
    launcher = [] if alone else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{size}"]
    settings = [*(["--tiny"] if options.tiny else []), "--warmup", f"{options.warmup}"]

    def measure(case: Case) -> Measurement | str:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            start = [sys.executable, *launcher, str(Path(__file__).resolve()), "--cases", case.name, *settings]
            return in_new_processes([*start, "--result", str(result)], result, _CASE_TIMEOUT_S)

    def write(rows: Sequence[str], cases: Sequence[Case]) -> None:
        print(rows[-1], flush=True)
        path.write_text(report(rows, cases, machine, shlex.join(words), tiny=options.tiny))

    succeeded = outcomes(chosen, measure=measure, write=write)
    return int(ExitCode.OK if succeeded else ExitCode.BUG)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
