"""A mixer and a feed-forward module, each registered by one imported file.

docs/development.md shows these files.
"""

import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from arguments.huggingface import AnotherModel, rebuilt_from_flags
from arguments.read import read_plan
from megatron_moe.build import build_model
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.imports import import_file
from megatron_moe.config.model_differences import config_differences
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.registry import FEED_FORWARDS, MIXERS
from megatron_moe.config.run import RunPlan
from megatron_moe.layers.components import Site, new_module
from megatron_moe.layers.quantized_module import quantizers_of
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import named_parameters
from pretrain_moe import main
from tests.end_to_end.tiny_run import arguments, losses, succeed
from tests.helpers.check_cases import EIGHT_RANKS
from tests.helpers.command_lines import plan_of, texts_of
from tests.helpers.example_proofs import COVER, check_layout, check_memory, check_replay, covering, with_fp8
from tests.helpers.modules import standalone_resources
from tests.helpers.pipelines import KERNELS
from tests.helpers.programs import run_ranks
from tests.parity import cells
from tests.parity.dimensions import cell_of

FOLDER = Path(__file__).parent
FILES = tuple(str(FOLDER / f"{name}.py") for name in ("mixer", "feed_forward"))
USE = "--mixer short_conv --feed-forward auto soft_mixture --short-conv-taps 3".split()


class Sizes:
    """Flags that the factories of the examples read."""

    num_layers, hidden_size, ffn_hidden_size, short_conv_taps = 1, 24, 48, 3


def components(hidden_size: int = 24):
    for file in FILES:
        import_file(file)
    sizes = Sizes()
    sizes.hidden_size = hidden_size
    return MIXERS.get("short_conv")(sizes)[0], FEED_FORWARDS.get("soft_mixture")(sizes)[0]


def with_examples(plan: RunPlan) -> RunPlan:
    """Puts the mixer in all layers of a parity plan, and the feed-forward module in all dense layers."""
    mixer, feed_forward = components(plan.model.hidden_size)
    layers = tuple(
        replace(layer, mixer=mixer, feed_forward=layer.feed_forward if layer.is_moe else feed_forward)
        for layer in plan.model.layers
    )
    return replace(plan, model=replace(plan.model, layers=layers))


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(tp=2, world_size=2, sequence_parallel=True)])
def test_declared_parameters_are_those_of_the_modules(parallel):
    for config in components():
        context = ParallelContext.fake(parallel, parallel.world_size - 1)
        try:
            resources = standalone_resources(context, KERNELS)
            built = dict(named_parameters(new_module(config, Site("layer", 0), resources)))
        finally:
            context.stop()
        declared = {
            spec.name: (spec.shape, spec.meta, spec.local_numel(parallel)) for spec in config.parameters(parallel)
        }
        assert declared == {name: (p.global_shape, p.meta, p.numel()) for name, p in built.items()}


@pytest.mark.parametrize(
    "cell",
    [
        *covering("dispatcher=alltoall"),
        "tp=2 sp=on dp=2 balance=none recompute=small",
        "cp=2 pp=2 accumulation=2 balance=none recompute=full",
        "tp=2 sp=on cp=2 documents=packed balance=none",
    ],
)
def test_layouts_equal_one_rank(cell):
    check_layout(with_examples(cells.plan_of(cell_of(cell))))


def test_layouts_with_fp8_gemms_equal_one_rank():
    plan = with_fp8(with_examples(cells.plan_of(cell_of("tp=2 sp=on balance=none"))))
    check_layout(plan)
    names = {quantizer.name for quantizer in quantizers_of(build_model(plan, ParallelContext.single(), KERNELS))}
    expected = {f"decoder.layers.0.self_attention.{name}" for name in ("linear_in", "linear_out")}
    assert expected | {"decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2"} <= names


def test_replayed_graphs_equal_eager_steps():
    check_replay(with_examples(cells.plan_of(cell_of("balance=none"))))


@pytest.mark.parametrize("recompute", ["", "--recompute-granularity selective --recompute-modules mlp layernorm"])
def test_emulated_memory_agrees_with_the_cost_model(recompute):
    words = " ".join(["--import", *FILES, "--mixer short_conv --feed-forward soft_mixture"])
    sizes = "--seq-length 1024 --max-position-embeddings 1024 --hidden-size 1024 --ffn-hidden-size 8192 --bf16"
    check_memory(plan_of(f"{words} {sizes} --transformer-impl local --micro-batch-size 2 {recompute}"))


def test_a_dry_run_counts_the_parameters_of_the_components(capsys):
    def millions(taps: int) -> float:
        sizes = ["--num-layers", "3", "--hidden-size", "192", "--short-conv-taps", str(taps)]
        main(["--recipe", "quickstart", "--dry-run", "--import", *FILES, *USE[:-2], *sizes], {})
        (number,) = re.findall(r"([\d.]+) M parameters", capsys.readouterr().out)
        return float(number)

    assert millions(1003) - millions(3) == pytest.approx(3 * 192 * 1000 / 1e6, abs=0.011)


def test_every_pair_of_layouts_is_covered():
    cover = [cell_of(f"{cell} dispatcher=alltoall") for cell in COVER]
    for pair in combinations(("tp", "cp", "pp", "vpp", "ep"), 2):
        assert any(all(cell[axis] == "2" for axis in pair) for cell in cover), pair


def test_layouts_that_do_not_divide_the_modules_are_rejected():
    plan = plan_of(" ".join(["--import", *FILES, *USE]))
    found = [(type(layer.mixer).__name__, type(layer.feed_forward).__name__) for layer in plan.model.layers[:2]]
    assert found == [("ShortConvConfig", "MLPConfig"), ("ShortConvConfig", "SoftMixtureConfig")]
    assert plan.model.layers[0].mixer.taps == 3
    flags = "--ffn-hidden-size 254 --tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 32"
    (text,) = texts_of(" ".join(["--import", *FILES, *USE, flags]), environ=EIGHT_RANKS)
    assert text == "2 tensor-parallel ranks cannot share 127 channels equally"


def test_flags_of_a_model_give_its_components():
    more = "--short-conv-taps 5 --ffn-hidden-size 96 --router-temperature 2 --moe-router-score-function warm_sigmoid"
    model = plan_of(" ".join(["--import", *FILES, str(FOLDER / "flag.py"), *USE[:-2], more])).model
    assert config_differences(rebuilt_from_flags(model), model) == []


def test_flags_of_components_are_compared_with_a_published_model(tmp_path):
    published = json.loads((FOLDER.parent / "data_files" / "hf_configs.json").read_text())["Qwen3-30B-A3B"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    words = ["--from-hf-config", str(tmp_path), "--check-against-hf", str(tmp_path), "--import", FILES[0]]
    with pytest.raises(AnotherModel) as caught:
        read_plan([*words, "--mixer", "short_conv", "--short-conv-taps", "3"], {})
    rows = {line.split()[0]: line.split()[1:] for line in str(caught.value).splitlines() if line.startswith("  --")}
    assert rows["--mixer"] == ["short_conv", "auto"] and rows["--short-conv-taps"] == ["3", "4"]


def test_a_run_trains_and_resumes_on_two_ranks(data, tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    command = arguments(data, run, "--import", *FILES, *USE, "--train-iters", "9", "--save-interval", "6")
    assert main(command, {}) == ExitCode.OK
    whole = losses(run)
    assert whole[6] < whole[1] - 0.5
    words = ["--config", run / "run.yaml", "--run-dir", again, "--load", run / "checkpoints", "--ckpt-step", "6"]
    words += ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--make-vocab-size-divisible-by", "4"]
    succeed(run_ranks(2, words, cwd=tmp_path))
    assert losses(again) == pytest.approx({i: whole[i] for i in (7, 8, 9)}, rel=1e-4)
