"""Layer patterns of hybrid models: letters, pipeline stages, multi-token prediction, and the resulting model config."""

import pytest

from arguments.files import read_file
from arguments.flags import Registry
from arguments.hybrid_pattern import depth_flags, pattern_flags
from arguments.parser import merge_settings, split
from arguments.plan_settings import plan_of
from arguments.values import BadValue
from megatron_moe.config.component import NoFeedForward, NoMixer
from megatron_moe.config.mamba import MambaConfig
from megatron_moe.config.parallel import ProcessInfo

REGISTRY = Registry.declared()
SIZES = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --train-iters 1 --mock-data --vocab-size 64 --num-experts 4 "
    "--mamba-num-groups 2 --mamba-head-dim 16 --mamba-state-dim 8 --position-embedding-type none"
)


def model_of(words: str, ranks: int = 1):
    settings = merge_settings(REGISTRY, [split([*SIZES.split(), *words.split()])[0]])
    assert settings.problems == []
    return plan_of(settings, ProcessInfo(world_size=ranks))


def test_every_letter_is_a_layer_with_one_module():
    model = model_of("--hybrid-layer-pattern M*-E+G --linear-num-key-heads 2 --linear-num-value-heads 2").model
    names = [each.component.module.rpartition(":")[2] for layer in model.layers for each in layer.sublayers]
    assert names == ["Mamba", "Attention", "MLP", "MoELayer", "MLA", "GatedDeltaNet"]
    assert all(
        isinstance(layer.mixer, NoMixer) != isinstance(layer.feed_forward, NoFeedForward) for layer in model.layers
    )
    mamba = model.layers[0].mixer
    assert isinstance(mamba, MambaConfig)
    assert (mamba.num_value_heads, mamba.num_key_heads, mamba.value_head_dim, mamba.key_head_dim) == (4, 2, 16, 8)
    # layers of hybrid models have one residual branch each, so Megatron scales by the number of layers, not twice it
    assert model.init.output_std == pytest.approx(0.02 / 6**0.5)


def test_stages_and_depths_become_a_pipeline_layout():
    plan = model_of("--hybrid-layer-pattern M|*E|M-|E/*E/*E --pipeline-model-parallel-size 2 --global-batch-size 2", 2)
    assert str(plan.layout) == "Et|(tt|)*2tmmL"
    assert plan.model.mtp is not None and plan.model.mtp.num_layers == 2
    assert [each.name for each in plan.model.mtp_layer.sublayers] == ["self_attention", "mlp"]
    assert plan.model.mtp_layer.is_moe


def test_a_file_and_the_deprecated_ratios_give_the_same_model(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("hybrid-attention-ratio: 0.125\nhybrid-override-pattern: M-M*\nis-hybrid-model: true\n")
    settings = merge_settings(REGISTRY, [split(SIZES.split())[0], read_file(path, REGISTRY, {}).flags])
    assert settings.problems == []
    assert plan_of(settings, ProcessInfo()).model == model_of("--hybrid-layer-pattern M-M*").model


def test_the_old_pattern_of_a_depth_gives_the_same_model():
    old = model_of("--hybrid-override-pattern ME --mtp-num-layers 2 --mtp-hybrid-override-pattern *E").model
    assert old == model_of("--hybrid-layer-pattern ME/*E/*E").model and old.mtp.num_layers == 2
    with pytest.raises(BadValue, match="takes the layers of one depth"):
        depth_flags([""])


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("MxE", "has 'x'; layers are M, G"),
        ("", "has no layers"),
        ("M*/E/*", "has different depths of multi-token prediction: E and *"),
        ("M*/MM", "has the depth MM"),
        ("M*/E*", "has the depth E*"),
    ],
)
def test_a_wrong_pattern_is_rejected(pattern: str, problem: str):
    with pytest.raises(BadValue, match=problem.replace("*", r"\*")):
        pattern_flags([pattern])


def test_a_ratio_needs_a_pattern():
    settings = merge_settings(REGISTRY, [split(["--hybrid-mlp-ratio", "0.5"])[0]])
    assert "needs a --hybrid-layer-pattern" in settings.problems[0].what
