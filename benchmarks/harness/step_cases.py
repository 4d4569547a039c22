"""Cases of benchmarks/harness/bench_step.py: flags and target speeds of the timed steps on one, two or four GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BF16_MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
SKEWED = "--no-moe-router-force-load-balancing --moe-router-force-biased 1.0"
LEARNED = "--no-moe-router-force-load-balancing --no-mock-data --split 100,0,0 --train-iters 400"
"""Flags of learned routing on text. The recipe's vocabulary size is kept; it is larger than the tokenizer's and a
multiple of 128."""
BEST = "--micro-batch-size 8 --moe-expert-wgrad-interval 1"
"""Flags of the fastest batch: one microbatch per step, so weight gradients are not batched."""
NO_OVERLAP = "--no-overlap-grad-reduce --no-overlap-param-gather"
WHOLE = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2"
"""Flags that capture whole steps, in the third warm-up step."""
HALF = "--moe-expert-capacity-factor 0.5 --moe-expert-wgrad-interval 1"
"""Flags that drop half of all rows, so that half of each buffer is unused. Paged rows exclude batched weight
gradients."""
PAGES = "--moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 0.6"
PAIRS_OF_GRADS = "--moe-expert-wgrad-interval 2"
MUON = "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2"
EP2 = {"m27": "--recipe m27 --num-layers 10 --moe-layer-freq ([0]*1+[1]*9)", "q24": "--recipe q24 --num-layers 8"}
"""Shapes of the cases on two GPUs."""
FLEX = (
    "--expert-model-parallel-size 2 --global-batch-size 32 --moe-token-dispatcher-type flex "
    "--moe-expert-rank-capacity-factor 2"
)
"""Flags of the flex dispatcher. The row bound suffices for any routing, and all cases have buffers of the same size."""
COPIES = "--moe-flex-dispatcher-backend copies"
NCCL = "--moe-token-dispatcher-type alltoall --moe-alltoall-backend nccl"
ECHO = f"{NCCL} --moe-enable-echo --moe-num-echo-experts 8"
ECHOES = {
    "nccl": NCCL,
    "echo": ECHO,
    "echo-overlap": f"{ECHO} --moe-echo-expert-dispatch-overlap",
    "echo-again": f"{ECHO} --moe-echo-recompute-expert-dispatch",
}
"""Flags of the exchange over NCCL without and with four clones per rank."""
MOE_GRAPHS = "--cuda-graph-impl local --cuda-graph-modules attn moe --cuda-graph-warmup-steps 2"
OVERLAPS = {
    "": "",
    "-wgrad": "--overlap-dispatch-backward-with-experts-wgrad",
    "-pairs": "--overlap-moe-expert-parallel-comm",
    "-pairs-wgrad": "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
}
"""Flags that overlap the exchange with computation, with buffers for balanced routing."""
FP8_WGRAD = "--fp8-format e4m3 --fp8-recipe blockwise"
FP8 = f"{FP8_WGRAD} --no-fp8-wgrad"
STORED = "--use-distributed-optimizer --fp8-param-gather"
FP16_MASTERS = "--main-params-dtype fp16"
LEAST_FP8 = f"{FP8_WGRAD} {STORED} --fp8-expert-wgrad always --activation-func-fp8-input-store {FP16_MASTERS}"
"""FP8 flags with the least memory; compare with `FP16_MASTERS`."""
BOUND = "--moe-expert-rank-capacity-factor 1.1"
WIRE = "--moe-dispatch-fwd-dtype fp8 --moe-combine-bwd-dtype fp8"
_START_SECONDS, _TRACE_SECONDS = 12.0, 4.0
"""Approximate time of building a model including the first step, and overhead of tracing."""


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """One row of the table."""

    name: str
    title: str
    flags: str
    """Flags of pretrain_moe.py."""
    target: str = ""
    """Required speed: TFLOP/s, or percent of the balanced case."""
    aim: str = ""
    """Desired speed, in the same unit."""
    warmup: int = 3
    steps: int = 10
    traced: int = 0
    step_seconds: float = 0.45
    """Approximate step time on an H200."""
    unbalanced: bool = False
    """True to compare with the balanced case of the same recipe."""
    on_text: bool = False
    replayed: bool = False
    """True to replay a routing trace."""
    num_gpus: int = 1

    @property
    def balanced(self) -> str:
        """Name of the case with the same shapes and balanced routing."""
        model, *_ = self.name.split("-")
        return f"{model}-flex" if self.num_gpus == 4 else model

    @property
    def model(self) -> str:
        """Name of the recipe."""
        return self.flags.split()[1]

    @property
    def seconds(self) -> float:
        """Approximate duration of the case."""
        steps = self.warmup + self.steps + self.traced
        return _START_SECONDS + steps * self.step_seconds + (_TRACE_SECONDS if self.traced else 0.0)


def _both(suffix: str, title: str, flags: str, goals: Sequence[tuple[str, str]], **rest: Any) -> tuple[StepCase, ...]:
    """Creates one case per model. `goals`: (target, aim) of each model."""
    return tuple(
        StepCase(
            name=recipe + suffix,
            title=f"{recipe.upper()}, {title}",
            flags=f"--recipe {recipe} {flags}",
            target=target,
            aim=aim,
            **rest,
        )
        for recipe, (target, aim) in zip(("q6", "m8"), goals, strict=True)
    )


_NONE, _PARTS = (("", ""), ("", "")), (("92%", "97%"), ("92%", "97%"))


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
TP_OVERLAP = "--tp-comm-overlap"
CP2 = "--context-parallel-size 2"
SKEW3 = "--moe-router-force-skew 3"
_M27_STAGES, _M14_STAGES, _Q12_STAGES = "Et*7|t*7|t*7|t*6L", "Et*4|t*4|t*4|t*2L", "Et*4|t*4|t*3|tL"
"""Stages of equal time: the output head takes as long as two layers of M27 and as three to four of Q24."""


_Row = tuple[str, str, str, str, str]
"""(suffix of the name, title, flags, target, aim) of a case."""


def _traced_rows(name: str, model: str, base: str, rows: Sequence[_Row], **fields: Any) -> tuple[StepCase, ...]:
    """Creates one traced case per row. `base`: flags of all rows. Targets in percent refer to the balanced case."""
    return tuple(
        StepCase(
            name=f"{name}-{suffix}",
            title=f"{model}, {title}",
            flags=f"{base} {flags}".strip(),
            target=target,
            aim=aim,
            unbalanced=target.endswith("%"),
            replayed=suffix.endswith("replayed"),
            traced=2,
            **fields,
        )
        for suffix, title, flags, target, aim in rows
    )


def _layouts_of_two() -> tuple[StepCase, ...]:
    """Cases of ten Moonlight layers in every layout of two GPUs, with kernels, idle time and exposed communication."""
    stages = "--pipeline-model-parallel-size 2 --expert-model-parallel-size 1"
    split, whole = f"--delay-wgrad-compute {PAIRS_OF_GRADS}", f"{WHOLE} {NO_OVERLAP}"
    pipelines = (
        (name + suffix, what or title, f"{stages} {layout} {flags}".strip(), *goals)
        for name, title, layout, goals in (
            ("pp2", "PP2 (6 and 4 layers), EP1", "--decoder-first-pipeline-num-layers 6", ("425", "440")),
            ("vpp2", "PP2, VPP2, EP1", "--pipeline-model-parallel-layout Ettt|ttt|ttt|tL", ("430", "445")),
        )
        for suffix, what, flags in (
            ("", "", ""),
            ("-wgrad", "the same, weight gradients delayed, of experts for two microbatches", split),
            ("-whole", "the same, whole steps as CUDA graphs", f"{split} {whole}"),
        )
    )
    rows = (
        ("ep2", "EP2, flex", FLEX, "452", "465"),
        ("alltoall", "EP2, alltoall", FLEX.replace(" flex", " alltoall"), "452", "465"),
        ("tp2", "TP2 with sequence parallelism, EP2, ETP1", f"{FLEX} {TP2}", "390", "430"),
        ("tp2-overlap", "the same, communication during GEMMs", f"{FLEX} {TP2} {TP_OVERLAP}", "390", "430"),
        (
            "tp2-overlap-whole",
            "the same, whole steps as CUDA graphs",
            f"{FLEX} {TP2} {TP_OVERLAP} {whole}",
            "390",
            "430",
        ),
        ("tp2-graphs", "TP2, attention and MoE layers as CUDA graphs", f"{FLEX} {TP2} {MOE_GRAPHS}", "390", "430"),
        ("tp2-whole", "the same, whole steps as CUDA graphs", f"{FLEX} {TP2} {whole}", "390", "430"),
        ("cp2", "CP2, EP2", f"{FLEX} {CP2}", "390", "430"),
        ("cp2-graphs", "the same, attention and MoE layers as CUDA graphs", f"{FLEX} {CP2} {MOE_GRAPHS}", "390", "430"),
        ("cp2-whole", "the same, whole steps as CUDA graphs", f"{FLEX} {CP2} {whole}", "390", "430"),
        (
            "cp2-copies-whole",
            "the same, copy engines, overlapped with shared experts and weight gradients",
            f"{FLEX} {CP2} {COPIES} {OVERLAPS['-wgrad']} --moe-shared-expert-overlap {whole}",
            "390",
            "430",
        ),
        *pipelines,
        ("ep2-whole", "EP2, flex, whole steps as CUDA graphs", f"{FLEX} {whole}", "", ""),
        ("ep2-pairs", "EP2, overlapped exchange", f"{FLEX} {OVERLAPS['-pairs']}", "", ""),
        ("ep2-pairs-whole", "the same, whole steps as CUDA graphs", f"{FLEX} {OVERLAPS['-pairs']} {whole}", "", ""),
        (
            "ep2-copies-whole",
            "EP2, copy engines, overlapped with shared experts and weight gradients, whole steps as CUDA graphs",
            f"{FLEX} {COPIES} {OVERLAPS['-wgrad']} --moe-shared-expert-overlap {whole}",
            "",
            "",
        ),
        (
            "ep2-copies-pairs-whole",
            "EP2, copy engines, overlapped exchange, whole steps as CUDA graphs",
            f"{FLEX} {COPIES} {OVERLAPS['-pairs']} {whole}",
            "",
            "",
        ),
        ("ep2-mb1", "EP2, micro batch 1", f"{FLEX} --micro-batch-size 1", "", ""),
        ("ep2-mb1-whole", "the same, whole steps as CUDA graphs", f"{FLEX} --micro-batch-size 1 {whole}", "", ""),
    )
    base = f"{EP2['m27']} --global-batch-size 32"
    return _traced_rows("layout", "M27", base, rows, steps=6, step_seconds=1.2, num_gpus=2)


def _long_contexts() -> tuple[StepCase, ...]:
    """Cases of dense stacks with sequences of 65,536 tokens on two context-parallel ranks, by kind of exchange.

    The same cases on one GPU, without peers, are the computation alone.
    """
    shapes = (
        "--seq-length 65536 --max-position-embeddings 65536 --micro-batch-size 1 --global-batch-size 2 "
        "--context-parallel-size 2 --vocab-size 8192 --num-experts 0 --expert-model-parallel-size 1 "
        "--moe-token-dispatcher-type alltoall --moe-expert-wgrad-interval 1"
    )
    gqa, mla = (f"--recipe {recipe} --num-layers 4 {shapes}" for recipe in ("q24", "m27"))
    delta, mamba = f"--recipe qn4 {shapes}", f"--recipe nn9 --hybrid-layer-pattern MMMM {shapes}"
    levels = "--hierarchical-context-parallel-sizes 2 1"
    rows = (
        ("gqa-p2p", "GQA, ring", f"{gqa} --cp-comm-type p2p", "", ""),
        ("gqa-allgather", "GQA, all-gather", f"{gqa} --cp-comm-type allgather", "", ""),
        ("gqa-a2a", "GQA, all-to-all", f"{gqa} --cp-comm-type a2a", "", ""),
        ("gqa-levels", "GQA, all-to-all and ring", f"{gqa} --cp-comm-type a2a+p2p {levels}", "", ""),
        ("mla-p2p", "MLA, ring", f"{mla} --cp-comm-type p2p", "", ""),
        ("delta-heads", "three gated delta nets by heads, one attention", delta, "", ""),
        ("delta-chunks", "the same by chunks", f"{delta} --linear-cp-mode chunkwise", "", ""),
        ("mamba-heads", "four Mamba layers by heads", mamba, "", ""),
        ("mamba-chunks", "the same by chunks", f"{mamba} --linear-cp-mode chunkwise", "", ""),
    )
    return _traced_rows("long", "64k tokens, CP2", "", rows, warmup=2, steps=3, step_seconds=1.2, num_gpus=2)


def _over_four(
    name: str, model: str, base: str, goals: tuple[str, str], step_seconds: float, **pipelines: str
) -> tuple[StepCase, ...]:
    """Cases of a model on four GPUs: transports, FP8, overlap, graphs, unbalanced loads and four-rank layouts.

    `base`: flags of the shapes; `goals`: target and aim of the balanced bf16 cases; `pipelines`: layout flags of PP2,
    of PP2 with VPP2, and of PP4. The row bound 2 suffices for the unbalanced loads, whose fullest rank has less than
    1.4 times the mean.
    """
    flex = "--moe-token-dispatcher-type flex"
    copies = f"{flex} {COPIES}"
    shared = f"{OVERLAPS['-wgrad']} --moe-shared-expert-overlap"
    pp2, pp4 = (f"{flex} --expert-model-parallel-size {4 // pp} --pipeline-model-parallel-size {pp}" for pp in (2, 4))
    unbalanced = f"{flex} --moe-expert-rank-capacity-factor 2"
    fp8_whole = f"{flex} {BOUND} {FP8_WGRAD} {WHOLE} {NO_OVERLAP}"
    fp8_graphs = f"{flex} {BOUND} {FP8_WGRAD} {MOE_GRAPHS} --moe-expert-wgrad-interval 1"
    rows = (
        ("flex", "EP4, flex", flex, *goals),
        ("alltoall", "EP4, alltoall", "", *goals),
        ("flex-fp8", "EP4, flex, FP8 blockwise", f"{flex} {BOUND} {FP8_WGRAD}", "", ""),
        ("alltoall-fp8", "EP4, alltoall, FP8 blockwise", f"{BOUND} {FP8_WGRAD}", "", ""),
        ("flex-fp8-graphs", "EP4, flex, FP8 blockwise, attention and MoE layers as CUDA graphs", fp8_graphs, "", ""),
        ("flex-pairs", "EP4, flex, overlapped", f"{flex} {OVERLAPS['-pairs']}", "", ""),
        ("alltoall-pairs", "EP4, alltoall, overlapped", OVERLAPS["-pairs"], "", ""),
        ("flex-whole", "EP4, flex, whole steps as CUDA graphs", f"{flex} {WHOLE} {NO_OVERLAP}", "", ""),
        (
            "flex-pairs-whole",
            "EP4, flex, overlapped, whole steps as CUDA graphs",
            f"{flex} {OVERLAPS['-pairs']} {WHOLE} {NO_OVERLAP}",
            "",
            "",
        ),
        (
            "copies-whole",
            "EP4, copy engines, overlapped with shared experts and weight gradients, whole steps as CUDA graphs",
            f"{copies} {shared} {WHOLE} {NO_OVERLAP}",
            *goals,
        ),
        (
            "copies-interval-whole",
            "the same, weight gradients of experts once for two microbatches",
            f"{copies} {shared} {PAIRS_OF_GRADS} {WHOLE} {NO_OVERLAP}",
            *goals,
        ),
        (
            "copies-pairs-whole",
            "EP4, copy engines, overlapped microbatches, whole steps as CUDA graphs",
            f"{copies} {OVERLAPS['-pairs']} {WHOLE} {NO_OVERLAP}",
            *goals,
        ),
        ("copies-pairs", "EP4, copy engines, overlapped microbatches", f"{copies} {OVERLAPS['-pairs']}", *goals),
        (
            "copies-fp8-whole",
            "EP4, copy engines, overlapped microbatches, FP8 blockwise, whole steps as CUDA graphs",
            f"{copies} {OVERLAPS['-pairs']} {BOUND} {FP8_WGRAD} {WHOLE} {NO_OVERLAP}",
            "",
            "",
        ),
        ("flex-fp8-whole", "EP4, flex, FP8 blockwise, whole steps as CUDA graphs", fp8_whole, "", ""),
        ("flex-graphs", "EP4, flex, attention and MoE layers as CUDA graphs", f"{flex} {MOE_GRAPHS}", "", ""),
        ("flex-skew3", "EP4, flex, expert skew 3", f"{SKEW3} {unbalanced}", "95%", ""),
        (
            "flex-skew3-whole",
            "EP4, flex, expert skew 3, whole steps as CUDA graphs",
            f"{SKEW3} {unbalanced} {WHOLE} {NO_OVERLAP}",
            "95%",
            "",
        ),
        ("flex-replayed", "EP4, flex, replayed choices", unbalanced, "95%", ""),
        ("tp2-ep4", "TP2, EP4", f"{flex} {TP2}", "", ""),
        ("tp2-ep4-whole", "TP2, EP4, whole steps as CUDA graphs", f"{flex} {TP2} {WHOLE} {NO_OVERLAP}", "", ""),
        ("cp2-ep4", "CP2, EP4", f"{flex} {CP2}", "", ""),
        ("cp2-ep4-whole", "CP2, EP4, whole steps as CUDA graphs", f"{flex} {CP2} {WHOLE} {NO_OVERLAP}", "", ""),
        ("pp2-ep2", "PP2, EP2", f"{pp2} {pipelines['pp2']}", "", ""),
        ("vpp2-ep2", "PP2, VPP2, EP2", f"{pp2} {pipelines['vpp2']}", "", ""),
        ("pp4", "PP4", f"{pp4} {pipelines['pp4']}", "", ""),
        ("tp2-pp2", "TP2, PP2", f"{pp2} {TP2} {pipelines['pp2']}", "", ""),
    )
    return _traced_rows(f"{name}x4", model, base, rows, steps=4, step_seconds=step_seconds, num_gpus=4)


def _over_two(name: str, **rest: Any) -> tuple[StepCase, ...]:
    """Cases of one model with EP 2: balanced load, whole layers captured as graphs, and unbalanced loads."""

    def case(suffix: str, title: str, flags: str = "", **fields: Any) -> StepCase:
        flags = f"{EP2[name]} {FLEX} {flags}".strip()
        return StepCase(
            name=name + suffix, title=f"{name.upper()}, {title}", flags=flags, num_gpus=2, steps=4, **rest | fields
        )

    return (
        case("", "balanced"),
        case("-fp8", "row bound 1.1, FP8 blockwise", f"{BOUND} {FP8}", traced=2),
        case("-fp8-wire", "row bound 1.1, FP8 blockwise, tokens sent in FP8", f"{BOUND} {FP8} {WIRE}", traced=2),
        case("-moe-graphs", "balanced, attention and MoE layers as CUDA graphs", MOE_GRAPHS),
        *(
            case(f"-skew{skew}", f"expert skew {skew}", f"--moe-router-force-skew {skew}", unbalanced=True)
            for skew in (1.5, 3, 4.4, 8)
        ),
        *(
            case(f"-bound1.1{suffix}", f"row bound 1.1 {flags}".strip(), f"{BOUND} {flags}")
            for suffix, flags in OVERLAPS.items()
        ),
        case("-replayed", "replayed choices of a trained router", unbalanced=True, replayed=True),
        *(
            case(f"-{suffix}-skew8", f"{flags}, expert skew 8", f"--moe-router-force-skew 8 {flags}", unbalanced=True)
            for suffix, flags in ECHOES.items()
        ),
        *(
            case(f"-{suffix}-replayed", f"{flags}, replayed choices", flags, unbalanced=True, replayed=True)
            for suffix, flags in ECHOES.items()
        ),
    )


CASES = (
    *_both("", "micro batch 2", "--micro-batch-size 2", (("400", "490"), ("440", "515")), traced=2),
    *_both("-mb8", "micro batch 8, the largest that fits", BEST, (("420", "500"), ("460", "525"))),
    *_both("-mb4", "micro batch 4", "--micro-batch-size 4", _NONE),
    *_both("-mb1", "micro batch 1", "--micro-batch-size 1", _NONE, traced=2, step_seconds=0.6),
    *_both("-mb1-whole", "micro batch 1, whole steps as CUDA graphs", f"--micro-batch-size 1 {WHOLE}", _NONE),
    *_both("-whole", "micro batch 2, whole steps as CUDA graphs", WHOLE, _NONE),
    *_both("-gb64", "global batch 64", "--global-batch-size 64", _NONE, warmup=1, steps=3, step_seconds=3.5),
    StepCase(name="qn4", title="QN4, micro batch 2", flags="--recipe qn4", target="380", aim="430", traced=2),
    StepCase(name="qn4-mb4", title="QN4, micro batch 4", flags="--recipe qn4 --micro-batch-size 4"),
    StepCase(
        name="qn4-gb32",
        title="QN4, micro batch 4, global batch 32",
        flags="--recipe qn4 --micro-batch-size 4 --global-batch-size 32",
        target="380",
        aim="430",
        steps=8,
        traced=1,
        step_seconds=1.3,
    ),
    StepCase(name="nn9", title="NN9, micro batch 2", flags="--recipe nn9", target="350", aim="400", traced=2),
    StepCase(name="nn9-mb4", title="NN9, micro batch 4", flags="--recipe nn9 --micro-batch-size 4"),
    StepCase(
        name="nn9-gb32",
        title="NN9, micro batch 4, global batch 32",
        flags="--recipe nn9 --micro-batch-size 4 --global-batch-size 32",
        target="350",
        aim="400",
        steps=8,
        traced=1,
        step_seconds=1.6,
    ),
    StepCase(name="nn9-fp8", title="NN9, FP8 blockwise", flags=f"--recipe nn9 {FP8}", traced=2),
    StepCase(name="ds4", title="DS4, micro batch 1", flags="--recipe ds4", steps=8, traced=2, step_seconds=1.3),
    StepCase(name="x2", title="X2", flags="--recipe x2", steps=8, traced=2, step_seconds=1.3),
    *(
        StepCase(
            name=f"{name}-{suffix}",
            title=f"{name.upper()}, {title}",
            flags=f"--recipe {name} {flags}",
            steps=8,
            traced=2,
            step_seconds=seconds,
        )
        for suffix, title, flags in (
            ("fp8", "FP8 blockwise", FP8),
            ("fp8-wgrad", "FP8 blockwise, weight gradients too", FP8_WGRAD),
        )
        for name, seconds in (("q6", 0.35), ("m8", 0.45), ("ds4", 1.1), ("x2", 1.1))
    ),
    *_both("-fp8-whole", "FP8 blockwise, whole steps as CUDA graphs", f"{FP8} {WHOLE}", _NONE, traced=2),
    *_both("-fp8-stored", "FP8 blockwise, weights stored in FP8", f"{FP8} {STORED}", _NONE, traced=2),
    *_both(
        "-fp8-stored-whole",
        "FP8 blockwise, weights stored in FP8, whole steps as CUDA graphs",
        f"{FP8} {STORED} {WHOLE}",
        _NONE,
        traced=2,
    ),
    *_both("-fp16-masters", "masters in fp16", FP16_MASTERS, _NONE),
    *_both("-fp8-least", "FP8 blockwise with the least memory, masters in fp16", LEAST_FP8, _NONE, traced=2),
    *_both(
        "-fp8-least-bf16-moments", "FP8 with the least memory, moments in bf16", f"{LEAST_FP8} {BF16_MOMENTS}", _NONE
    ),
    *_both(
        "-fp8-graphs",
        "FP8 blockwise, attention and MoE layers as CUDA graphs",
        f"{FP8} {MOE_GRAPHS} --moe-expert-wgrad-interval 1",
        _NONE,
        traced=2,
    ),
    *_both("-fp32-masters", "masters in fp32", "--no-use-precision-aware-optimizer", _NONE),
    *_both("-bf16-moments", "moments in bf16", BF16_MOMENTS, _NONE),
    *_both("-repeatable", "--deterministic-mode", "--deterministic-mode", _NONE),
    StepCase(name="q6-half", title="Q6, half of the rows dropped", flags=f"--recipe q6 {HALF}"),
    StepCase(name="q6-half-pages", title="Q6, the same in pages", flags=f"--recipe q6 {HALF} {PAGES}"),
    *_both("-skewed", "skewed routing", SKEWED, _PARTS, unbalanced=True),
    *(
        StepCase(
            name=f"m8-1m{suffix}",
            title=f"M8, 1 million tokens a step, {title}",
            flags=f"--recipe m8 {BEST} --global-batch-size 256 {flags}",
            warmup=1,
            steps=3,
            step_seconds=14.0,
        )
        for suffix, title, flags in (("", "AdamW", ""), ("-muon", "Muon", MUON))
    ),
    StepCase(name="m8-qk-clip", title="M8, micro batch 8, QK-clip", flags=f"--recipe m8 {BEST} --qk-clip"),
    StepCase(
        name="m8-max-logit",
        title="M8, micro batch 8, largest logits logged",
        flags=f"--recipe m8 {BEST} --log-max-attention-logit",
    ),
    *_over_two("m27", step_seconds=1.1),
    *_over_two("q24", step_seconds=0.8),
    *_layouts_of_two(),
    *_long_contexts(),
    *_over_four(
        "m27",
        "M27",
        "--recipe m27",
        ("465", "500"),
        2.5,
        pp2="--decoder-first-pipeline-num-layers 14",
        vpp2=f"--pipeline-model-parallel-layout {_M27_STAGES}",
        pp4=f"--pipeline-model-parallel-layout {_M27_STAGES}",
    ),
    *_over_four(
        "q24",
        "Q24",
        "--recipe q24",
        ("430", "465"),
        2.0,
        pp2="",
        vpp2="--num-layers-per-virtual-pipeline-stage 6",
        pp4="",
    ),
    *_over_four(
        "m14",
        "M27 with 14 layers",
        "--recipe m27 --num-layers 14 --moe-layer-freq ([0]*1+[1]*13)",
        ("465", "500"),
        1.4,
        pp2="--decoder-first-pipeline-num-layers 8",
        vpp2=f"--pipeline-model-parallel-layout {_M14_STAGES}",
        pp4=f"--pipeline-model-parallel-layout {_M14_STAGES}",
    ),
    *_over_four(
        "q12",
        "Q24 with 12 layers",
        "--recipe q24 --num-layers 12",
        ("430", "465"),
        1.1,
        pp2="--decoder-first-pipeline-num-layers 8",
        vpp2=f"--pipeline-model-parallel-layout {_Q12_STAGES}",
        pp4=f"--pipeline-model-parallel-layout {_Q12_STAGES}",
    ),
    *_both("-learned", "learned routing on text", LEARNED, _PARTS, unbalanced=True, on_text=True, warmup=200, traced=2),
)


def words_of(
    case: StepCase, data_path: Path, tokenizer_model: Path, trace_dir: Path, more: Sequence[str] = ()
) -> list[str]:
    """Arguments of pretrain_moe.py. Cases that train on text read the given corpus; cases with replayed routing read a
    folder in `trace_dir`."""
    text = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(tokenizer_model)]
    text += ["--data-path", str(data_path)]
    replay = ["--moe-routing-replay-path", str(trace_dir / case.model)]
    return [*case.flags.split(), *(text if case.on_text else ()), *(replay if case.replayed else ()), *more]
