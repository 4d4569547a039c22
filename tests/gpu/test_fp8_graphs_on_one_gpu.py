"""CUDA graphs with FP8 and FP4 GEMMs on one GPU: replayed steps equal eager steps bit for bit."""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.test_graphs_on_one_gpu import WHOLE, train
from tests.gpu.test_step_on_one_gpu import LAYERS, SMALL
from tests.helpers.tolerances import EXACT

pytestmark = pytest.mark.gpu1

BLOCKWISE = "--fp8-format e4m3 --fp8-recipe blockwise"
EMULATED = (
    "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 2",
    "--fp8-format e4m3 --fp8-recipe tensorwise",
    "--fp8-format e4m3 --fp8-recipe mxfp8",
    "--fp4-format e2m1",
)


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def flags_of(recipe: str, precision: str, *more: str) -> list[str]:
    common = "--lr 1e-2 --deterministic-mode --no-moe-router-force-load-balancing"
    return ["--recipe", recipe, *SMALL.split(), *LAYERS[recipe].split(), *common.split(), *precision.split(), *more]


@pytest.mark.parametrize(
    ("recipe", "more", "captured"),
    [
        ("m8", "--no-fp8-wgrad --moe-expert-wgrad-interval 1", (("attn", "moe"), ("attn", "mlp", "moe_router"), WHOLE)),
        ("m8", "--no-fp8-wgrad --moe-expert-wgrad-interval 2", (WHOLE,)),
        ("q6", "--no-fp8-wgrad --moe-expert-wgrad-interval 1", (("attn", "moe"), WHOLE)),
        ("m8", "--fp8-wgrad --moe-expert-wgrad-interval 1", (("attn", "moe"), WHOLE)),
        (
            "m8",
            "--no-fp8-wgrad --moe-expert-wgrad-interval 1 --use-distributed-optimizer --fp8-param-gather",
            (("attn", "moe"), WHOLE),
        ),
    ],
    ids=["m8", "m8-batched", "q6", "m8-fp8-wgrad", "m8-stored-weights"],
)
def test_replayed_steps_equal_eager_steps(recipe: str, more: str, captured: tuple[tuple[str, ...], ...]) -> None:
    """Covers graphs of dropless MoE layers and of whole steps."""
    flags = flags_of(recipe, BLOCKWISE, *more.split())
    expected = train(flags)
    for modules in captured:
        EXACT.check_all(train(flags, modules), expected, "+".join(modules))


def test_casts_fused_into_norms_change_no_bit() -> None:
    flags = flags_of("m8", BLOCKWISE, "--no-fp8-wgrad", "--kernel-per-op")
    separate = train([*flags, "rms_norm_quantized=reference"])  # selects separate norms and casts
    EXACT.check_all(train([*flags, "rms_norm_quantized=triton"]), separate, "fused")
    recompute = [
        "--recompute-granularity",
        "selective",
        "--recompute-modules",
        "layernorm",
        "mla_up_proj",
        "--no-fp8-wgrad",
    ]
    EXACT.check_all(train([*flags, "rms_norm_quantized=triton", *recompute], WHOLE), separate, "recomputed in a graph")


@pytest.mark.parametrize("precision", EMULATED, ids=["delayed", "tensorwise", "mxfp8", "nvfp4"])
def test_steps_with_emulated_recipes_equal_eager_steps(precision: str) -> None:
    flags = flags_of("m8", precision, "--emulate-low-precision", "--moe-expert-wgrad-interval", "1")
    expected = train(flags)
    for modules in (("attn", "moe"), WHOLE):
        EXACT.check_all(train(flags, modules), expected, "+".join(modules))
