"""Figures in docs/memory.md equal those of the cost model."""

from collections.abc import Iterator
from dataclasses import replace

from arguments.flags import Registry
from arguments.plan_search import plan_as_given, settings_of
from arguments.recipe_table import row_of
from megatron_moe.config.memory import ActivationOffloadConfig, MemoryConfig, RecomputeConfig
from megatron_moe.config.precision import low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GIB, GPUS
from megatron_moe.cost_model.memory import LATE, RankBytes, RankMemory, rank_with_peak_memory
from tests.cost_model.test_memory import BF16, DEEPSEEK, with_standard_permutation
from tests.house_rules.source import ROOT

STANDARD_PERMUTATION = 4096 * 8 * 7168 * 2
"""Bytes of one layer for expert outputs, one row per choice, which the gradient of the probabilities needs."""


def switched(plan: RunPlan, recompute: tuple[str, ...] = (), offload: tuple[str, ...] = ()) -> RunPlan:
    config = RecomputeConfig(recompute_modules=recompute) if recompute else RecomputeConfig()
    return replace(
        plan, memory=MemoryConfig(recompute=config, offload=ActivationOffloadConfig(offload_modules=offload))
    )


def of_rank(plan: RunPlan, rank: int = 1) -> RankBytes:
    return RankMemory(plan).of_rank(rank)


def rows() -> Iterator[tuple[str, str, str]]:
    """Rows of the table: (quantity, published value, value of the cost model)."""
    plain = of_rank(DEEPSEEK)

    def freed(*modules: str) -> float:
        return (plain.activation_bytes - of_rank(switched(DEEPSEEK, modules)).activation_bytes) / GIB

    def moved(*modules: str) -> str:
        return f"{1 - of_rank(switched(DEEPSEEK, (), modules)).total / plain.total:.1%}"

    three = ("mla_up_proj", "layernorm", "moe_act")
    standard = of_rank(with_standard_permutation(DEEPSEEK)).activation_bytes - plain.activation_bytes
    assert standard == 68 * STANDARD_PERMUTATION
    lean = of_rank(replace(DEEPSEEK, precision=replace(BF16, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")))
    low = of_rank(replace(DEEPSEEK, precision=replace(BF16, low_precision=low_precision_config("blockwise"))))
    h100 = row_of("deepseek-v3-h100-1024", Registry.declared()).plan
    paper = ("mlp", "mla_up_proj", "moe_act", "layernorm")
    yield "total of a middle stage", "199.5", f"{plain.total / GIB:.1f}"
    yield "H100 recipe, switches of its recipe", "under 80", f"{_most(h100):.1f}"
    yield "H100 recipe, the four modules of the paper", "under 80", f"{_most(switched(h100, paper)):.1f}"
    yield "its layout in bf16 without switches", "-", f"{_most(replace(switched(h100), precision=BF16)):.1f}"
    yield "mla_up_proj", "30.4", f"{freed('mla_up_proj'):.1f}"
    yield "moe_act", "3.8", f"{freed('moe_act'):.1f}"
    yield "layernorm", "8.2", f"{freed('layernorm'):.1f}"
    yield "the three together, of the total", "33 %", f"{freed(*three) * GIB / plain.total:.1%}".replace("%", " %")
    yield "memory-efficient permutation", "26.3", f"{standard / GIB:.1f}"
    share = standard / (plain.activation_bytes + standard)
    yield "the same, of the activations", "20 %", f"{share:.1%}".replace("%", " %")
    for modules in (("moe_act",), ("expert_fc1",), ("core_attn",)):
        yield f"offload of {' '.join(modules)}, of the total", "10 to 18 %", moved(*modules).replace("%", " %")
    yield "FP8 activations (estimate)", "16", f"{(plain.activation_bytes - low.activation_bytes) / GIB:.1f}"
    yield "moments in bf16", "10 to 12", f"{(plain.state.total - lean.state.total) / GIB:.1f}"
    yield from _long()


def _long() -> Iterator[tuple[str, str, str]]:
    plan = switched(row_of("deepseek-v3-h100-256-64k", Registry.declared()).plan)
    most = rank_with_peak_memory(RankMemory(plan).all_ranks())
    without = switched(plan, ("mla_up_proj", "moe", "mlp", "layernorm"))
    freed = most.activation_bytes - RankMemory(without).of_rank(most.rank).activation_bytes
    tensors = RankMemory(plan).tensors(plan.model.layers[30])
    (output,) = (each.bytes for each in tensors if (each.module, each.name) == ("attention", "output"))
    assert most.in_flight == 35
    yield "64K tokens: recompute of all but attention", "89.8", f"{freed / GIB:.1f}"
    yield "64K tokens: recompute of attention alone", "9", f"{2 * most.in_flight * output / GIB:.1f}"


def _most(plan: RunPlan) -> float:
    return rank_with_peak_memory(RankMemory(plan).all_ranks()).total / GIB


FP8 = "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather --use-distributed-optimizer"
FP16 = "--main-params-dtype fp16"
WGRAD, INPUTS = "--fp8-expert-wgrad always", "--activation-func-fp8-input-store"
MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


def m8(*flags: str) -> RankBytes:
    """Memory of recipe m8 with additional flags."""
    settings = settings_of(["--recipe", "m8", *" ".join(flags).split()], Registry.declared())
    return of_rank(plan_as_given(settings, GPUS["h200"], 1), 0)


def fp8_totals() -> Iterator[tuple[str, ...]]:
    """Rows (settings, GiB, GiB in bf16, GiB in bf16 with bf16 moments) of M8."""
    plain = [m8(*each).total for each in ((FP16,), (FP16, MOMENTS))]
    for name, flags in {
        "bf16": (FP16,),
        "FP8, masters in fp32": (FP8,),
        "FP8": (FP8, FP16),
        "FP8, weight gradients of experts too": (FP8, FP16, WGRAD),
        "FP8, activation inputs too": (FP8, FP16, INPUTS),
        "FP8, both": (FP8, FP16, WGRAD, INPUTS),
    }.items():
        totals = m8(*flags).total, m8(*flags, MOMENTS).total
        cells = [(f"{size / GIB:.1f}", f"{size / of:.3f}") for size, of in zip(totals, plain, strict=True)]
        yield name, *cells[0], *cells[1]


def fp8_classes() -> Iterator[tuple[str, ...]]:
    """Rows (class of tensors, GiB in bf16, in FP8 with fp32 masters, in FP8 with minimum memory) of M8."""
    runs = m8(FP16), m8(FP8), m8(FP8, FP16, WGRAD, INPUTS)
    for name, of in {
        "weights": lambda run: run.state.weights,
        "master weights": lambda run: run.state.master,
        "gradients, fp32": lambda run: run.state.gradients,
        "moments, fp32": lambda run: run.state.moments,
        "operands of delayed weight gradients": lambda run: dict(run.activations)[LATE],
        "logits": lambda run: dict(run.activations)["head"],
        "rows and activation inputs of experts": lambda run: dict(run.activations)["experts"],
        "dense MLP and shared experts": lambda run: sum(dict(run.activations)[each] for each in ("mlp", "shared")),
        "attention": lambda run: dict(run.activations)["attention"],
        "residual stream and norms": lambda run: sum(size for name, size in run.activations if "norm" in name),
    }.items():
        yield name, *(f"{of(run) / GIB:.2f}" for run in runs)


def test_the_tables_of_the_document_are_current() -> None:
    text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for cells in (*rows(), *fp8_totals(), *fp8_classes()):
        assert f"| {' | '.join(cells)} |" in text, f"| {' | '.join(cells)} |"
