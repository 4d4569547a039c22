"""`--proxy` rewrites a large run into a small one with the same code paths and reports every rewrite."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arguments.errors import FlagErrors
from arguments.read import layout_to_fold, read_plan
from megatron_moe.config.attention import AttentionConfig
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.run import RunPlan
from tests.helpers.command_lines import SMALL, words
from tests.helpers.zoo import ZooRow, command_line, zoo_rows

ROWS = zoo_rows()


def environ(num_ranks: int) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return dict(zip(names, map(str, (0, 0, num_ranks, num_ranks)), strict=True))


def proxy(argv: Sequence[str], after: str = "", num_ranks: int = 1) -> RunPlan:
    return read_plan([*argv, "--proxy", *words(after)], environ(num_ranks))


def small(more: str = "", after: str = "", num_ranks: int = 1) -> RunPlan:
    return proxy([*words(SMALL), *words(more)], after, num_ranks)


def rewrites(plan: RunPlan) -> list[str]:
    return [note for note in plan.notes if note.startswith("proxy: ")]


def kind(layer: LayerConfig) -> tuple[bool, bool, bool]:
    """Whether a layer has experts, a sliding window, and RoPE."""
    rotates = not isinstance(layer.mixer, AttentionConfig) or layer.mixer.rope is not None
    return layer.is_moe, layer.mixer.core.window is not None, rotates


def kinds(plan: RunPlan) -> set[tuple[bool, bool, bool]]:
    return {kind(layer) for layer in plan.model.layers}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_proxy_of_a_public_model_is_small_and_has_its_kinds_of_layers(row: ZooRow):
    plan, full = proxy(command_line(row)), read_plan(command_line(row), {})
    assert kinds(plan) == kinds(full)
    assert (plan.model.mtp is None) == (full.model.mtp is None)
    assert len(plan.model.layers) <= 4 and plan.model.hidden_size <= 64 and plan.loop.train_iters == 5
    assert plan.parallel.world_size == 1 and plan.data.mock_data


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ZooRow, list[str]]:
    """Strategy: a public model with layout flags that may or may not fit it."""
    row = draw(st.sampled_from(ROWS))
    heads = row.integer("num-attention-heads")
    groups = heads if row.is_mla else row.integer("num-query-groups")
    sizes = [size for size in (1, 2, 4, 8) if heads % size == 0 and (groups % size == 0 or size % groups == 0)]
    tp = draw(st.sampled_from(sizes))
    cp, pp, vpp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from((1, 2)))
    ep = draw(st.sampled_from([size for size in (1, 2, 8, 16, 64) if row.integer("num-experts") % size == 0]))
    found = [
        *("--tensor-model-parallel-size", tp, "--context-parallel-size", cp, "--pipeline-model-parallel-size", pp),
        *("--expert-model-parallel-size", ep, "--seq-length", 4096, "--max-position-embeddings", 4096),
        *("--micro-batch-size", draw(st.sampled_from((1, 4))), "--cp-comm-type", draw(st.sampled_from(_EXCHANGES))),
        *("--hierarchical-context-parallel-sizes", 2, cp // 2 or 1),
    ]
    found += ["--expert-tensor-parallel-size", 1] if draw(st.booleans()) else []
    found += ["--sequence-parallel"] if tp > 1 else []
    found += draw(st.sampled_from(_SWITCHES))
    if pp > 1:
        found += ["--pipeline-model-parallel-layout", "auto", "--num-virtual-stages-per-pipeline-rank", vpp]
    return row, [str(word) for word in found]


_EXCHANGES = ("p2p", "a2a", "a2a+p2p", "allgather")
_SWITCHES = (
    ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
    ["--moe-expert-capacity-factor", "1", "--moe-pad-expert-input-to-capacity"],
    ["--fp8-format", "e4m3", "--bf16", "--moe-token-dispatcher-type", "flex"],
    ["--global-batch-size", "4096", "--calculate-per-token-loss"],
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(layouts(), st.integers(1, 8))
def test_any_layout_of_any_public_model_folds_to_any_number_of_ranks(case: tuple[ZooRow, list[str]], num_ranks: int):
    row, layout = case
    argv = [*command_line(row), *layout]
    try:
        full = layout_to_fold([*argv, "--proxy"], {}).sizes
    except FlagErrors:
        assume(False)
    plan = proxy(argv, num_ranks=num_ranks)  # raises if the result violates any rule
    config = plan.parallel
    assert config.tp * config.cp * config.pp * config.dp == config.etp * config.ep * config.pp * config.edp == num_ranks
    for axis in ("tp", "cp", "pp", "ep"):
        assert getattr(config, axis) <= full.axes[axis]
    assert kinds(plan) == kinds(read_plan(command_line(row), {}))
    assert sum(stage.num_mtp for stage in plan.layout.stages) == row.integer("mtp-num-layers")


@pytest.mark.parametrize(("num_ranks", "replicas"), [(2, 2), (3, 1), (4, 4)])
def test_replicas_of_sharded_weights_are_folded(num_ranks: int, replicas: int):
    words = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer"
    words += " --num-distributed-optimizer-instances 4 --outer-dp-sharding-strategy optim"
    plan = small(words, num_ranks=num_ranks)
    assert plan.parallel.num_distributed_optimizer_instances == replicas
    assert plan.data_parallel.fsdp.outer_dp_sharding_strategy == ("no_shard" if replicas == 1 else "optim")


def test_every_rewrite_is_reported_with_both_values_and_its_reason():
    plan = small()
    lines = rewrites(plan)
    assert "proxy: --hidden-size 256 -> 64 (narrower)" in lines
    assert "proxy: --data-path corpus_text_document -> not set (random tokens)" in lines
    assert "proxy: --mock-data off -> on (random tokens)" in lines
    assert "proxy: --moe-layer-freq ([0]*1+[1]*3) -> ([0]*1+[1]*2) (the remaining layers)" in lines
    marked = [line for line in plan.resolved_yaml.splitlines() if line.endswith("# proxy")]
    assert len(marked) == len(lines) == len(set(lines))


def test_a_small_run_is_not_enlarged():
    tiny = small("--num-layers 2 --moe-layer-freq 1 --hidden-size 32 --num-experts 4 --seq-length 16")
    layer = tiny.model.layers[0]
    assert (len(tiny.model.layers), tiny.model.hidden_size, tiny.data.seq_length) == (2, 32, 16)
    assert layer.feed_forward.experts.num_experts == 4


def test_directories_of_the_full_size_run_are_not_used():
    plan = small("--load x --tensorboard-dir y --save z")
    assert plan.logging.run_dir is None and plan.checkpoint.save is None and plan.checkpoint.load is None
    assert plan.logging.tensorboard_dir is None


def test_a_save_directory_after_proxy_gets_a_final_checkpoint():
    plan = small("--save z --save-interval 1000", after="--save mine")
    assert (str(plan.checkpoint.save), plan.checkpoint.save_interval) == ("mine", plan.loop.train_iters)


def test_flags_after_proxy_are_kept():
    plan = small(after="--train-iters 7 --hidden-size 128 --run-dir mine --bf16")
    assert (plan.loop.train_iters, plan.model.hidden_size, plan.precision.params) == (7, 128, "bf16")
    assert str(plan.logging.run_dir) == "mine"
    assert not any("--hidden-size" in note or "--train-iters" in note for note in plan.notes)


def test_a_number_of_layers_after_proxy_is_kept_with_matching_patterns():
    plan = small("--num-layers 12 --moe-layer-freq ([0]*2+[1]*10) --window-size 31,0", "--num-layers 6")
    assert [layer.is_moe for layer in plan.model.layers] == [False, True, True, True, True, True]


def test_more_pipeline_stages_after_proxy_than_at_full_size_are_rejected():
    size = "--pipeline-model-parallel-size 2"
    with pytest.raises(FlagErrors, match="after --proxy needs 2 pipeline stages, but the full-size model has 1 stage"):
        small(after=size, num_ranks=2)
    assert small(f"{size} --num-layers 4", num_ranks=2).parallel.pp == 2


def test_sizes_after_proxy_are_not_folded():
    layout = "--pipeline-model-parallel-size 8 --num-layers 16 --moe-layer-freq 1 --global-batch-size 64"
    plan = small(layout, "--pipeline-model-parallel-size 4", num_ranks=4)
    assert (plan.parallel.pp, str(plan.layout)) == (4, "Et|(t|)*2tL")
    with pytest.raises(FlagErrors, match="the sizes given after --proxy do not fit 6 ranks: pp 4"):
        small(layout, "--pipeline-model-parallel-size 4", num_ranks=6)


@pytest.mark.parametrize(("num_ranks", "tp", "groups"), [(8, 2, 1), (1, 1, 1)])
def test_query_groups_shared_by_ranks_remain_shared(num_ranks: int, tp: int, groups: int):
    plan = small("--num-attention-heads 16 --tensor-model-parallel-size 8 --sequence-parallel", num_ranks=num_ranks)
    assert (plan.parallel.tp, plan.model.layers[0].mixer.num_query_groups) == (tp, groups)


def test_problems_of_the_full_size_run_are_reported():
    with pytest.raises(FlagErrors, match="at full size: 3 groups do not divide 8 experts"):
        small("--moe-router-num-groups 3")
    with pytest.raises(FlagErrors, match="--num-layers is required"):
        read_plan(["--proxy"], {})


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ("--bf16 --fp8-format e4m3", "--emulate-low-precision off -> on"),
        ("--decrease-batch-size-if-needed", "--decrease-batch-size-if-needed on -> off"),
        ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type flex -> alltoall"),
        ("--kernel-backend triton", "--kernel-backend triton -> auto"),
        ("--device cuda", "--device cuda -> auto"),
        ("--fp16", "--bf16 off -> on"),
        ("--moe-use-upcycling --load x", "--moe-use-upcycling on -> off"),
        ("--trust-remote-code", "--trust-remote-code on -> off"),
    ],
)
def test_unavailable_hardware_is_replaced(more: str, lines: str):
    assert any(lines in note for note in rewrites(small(more)))


def test_a_missing_feature_is_still_rejected():
    with pytest.raises(FlagErrors, match="--fp32-residual-connection is not available yet"):
        small("--fp32-residual-connection")


def test_fp64_after_proxy_replaces_all_other_dtypes():
    plan = small("--bf16 --grad-reduce-in-bf16", "--fp64")
    assert (plan.precision.params, plan.precision.grads, plan.precision.main_params_dtype) == ("fp64", "fp64", "fp64")


def test_variables_of_the_full_size_run_may_be_unset(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("tokenizer-model: ${TOKENIZER}\ndata-path: ['${DATA}/a']\nload: ${LOAD}\n")
    argv = [*words(SMALL, "--tokenizer-model --data-path"), "--config", str(recipe)]
    assert proxy(argv).data.mock_data
    with pytest.raises(FlagErrors, match="needs the environment variable TOKENIZER"):
        read_plan(argv, {})
    recipe.write_text("lr: ${RATE}\n")
    with pytest.raises(FlagErrors, match="needs the environment variable RATE"):
        proxy(argv)


def test_run_yaml_of_a_proxy_starts_the_same_run(tmp_path):
    plan = small("--window-size 31,0 --window-attn-skip-freq 2")
    saved = tmp_path / "run.yaml"
    saved.write_text(plan.resolved_yaml)
    reread = read_plan(["--config", str(saved)], {})
    assert (reread.model, reread.data, reread.loop, reread.lr_schedule) == (
        plan.model,
        plan.data,
        plan.loop,
        plan.lr_schedule,
    )


def test_groups_and_topk_keep_their_ratio():
    argv = command_line(next(row for row in ROWS if str(row) == "DeepSeek-V3"))
    router = proxy(argv).model.layers[-1].feed_forward.router
    assert (router.num_experts, router.topk, router.num_groups, router.group_topk) == (8, 4, 4, 2)  # was 256, 8, 8, 4


@pytest.mark.parametrize(("num_experts", "of_a_rank"), [(128, 2), (64, 1)])
def test_ranks_with_several_experts_keep_several(num_experts: int, of_a_rank: int):
    plan = small(f"--num-experts {num_experts} --expert-model-parallel-size 64", num_ranks=11)
    moe = plan.model.layers[-1].feed_forward
    assert plan.parallel.ep == 11 and moe.experts.num_experts == 11 * of_a_rank


def test_a_layer_interval_becomes_a_list_if_it_no_longer_fits():
    plan = small("--no-rope-freq 2 --moe-layer-freq 1 --num-layers 8")
    assert "proxy: --no-rope-freq 2 -> ([0]*1+[1]*1+[0]*1) (the remaining layers)" in rewrites(plan)
    plan = small("--window-size 31,0 --window-attn-skip-freq 2 --moe-layer-freq 1 --num-layers 8")
    assert not any("--window-attn-skip-freq" in note for note in plan.notes)
    assert [layer.mixer.core.window is not None for layer in plan.model.layers] == [True, False, True]


def test_windows_stay_shorter_than_the_sequence():
    core = small("--window-size 63,0").model.layers[0].mixer.core
    assert core.window == (15, 0) and small().data.seq_length == 64


@pytest.mark.parametrize(
    ("more", "width"),
    [
        ("", 16),
        ("--rotary-percent 0.07", 32),
        ("--rotary-percent 0.05 --kv-channels 42", 42),
        ("--kv-channels 8", 8),
        ("--position-embedding-type none --rotary-percent 0", 16),
    ],
)
def test_head_dims_stay_large_enough_to_rotate(more: str, width: int):
    assert small(more).model.layers[0].mixer.head_dim == width
