"""Resolution of flags to configs: layer specs, lengths in samples, and defaults derived from other flags."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from arguments.errors import FlagErrors
from arguments.read import read_plan
from megatron_moe.config.attention import NormConfig, RopeConfig
from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.model import InitConfig, MTPConfig
from megatron_moe.config.moe import CapacityConfig, ExpertsConfig, RouterConfig
from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.config.precision import PrecisionConfig, low_precision_config
from megatron_moe.config.residual import AddedResidual
from megatron_moe.config.training import BatchConfig
from megatron_moe.cost_model.parameters import count_parameters
from tests.helpers.check_cases import EIGHT_RANKS, GRAPHS, OVERLAP
from tests.helpers.command_lines import SMALL, plan_of, problems_of, texts_of, words
from tests.helpers.zoo import command_line, zoo_rows

MLA, ITERS = "--multi-latent-attention --no-group-query-attention", "--train-iters --lr-warmup-iters"


def layer(more: str = "", index: int = 1, without: str = ""):
    return plan_of(more, without).model.layers[index]


def test_the_pattern_selects_dense_and_moe_layers():
    assert [layer.is_moe for layer in plan_of().model.layers] == [False, True, True, True]
    assert [layer.is_moe for layer in plan_of("--moe-layer-freq 2").model.layers] == [True, False, True, False]
    assert not any(layer.is_moe for layer in plan_of("--num-experts 0").model.layers)


def test_the_dense_width_follows_megatrons_rule():
    def width(more: str) -> int:
        return layer(more, 0, "--ffn-hidden-size").feed_forward.ffn_hidden_size

    assert width("") == 640  # int(4 * 256 * 2 / 3 / 64) * 64
    assert width("--no-swiglu") == 1024


def test_expert_width_defaults_to_the_dense_ffn_width():
    assert layer(without="--moe-ffn-hidden-size").feed_forward.experts.ffn_hidden_size == 512


def test_experts_and_router():
    moe = layer(
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-z-loss-coeff 1e-3 --moe-router-dtype fp32 "
        "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-4 1e-3 "
        "--moe-latent-size 64 --moe-shared-expert-intermediate-size 96 --moe-shared-expert-gate --no-moe-grouped-gemm "
        "--moe-expert-capacity-factor 1.5 --moe-token-drop-policy position --moe-input-jitter-eps 0.1"
    ).feed_forward
    assert moe.router == RouterConfig(
        hidden_size=256,
        num_experts=8,
        topk=2,
        score_function="sigmoid",
        num_groups=4,
        group_topk=2,
        scaling_factor=2.5,
        expert_bias=True,
        balancing=("seq_aux_loss", "global_aux_loss"),
        aux_loss_coeffs=(1e-4, 1e-3),
        z_loss_coeff=1e-3,
        input_jitter_eps=0.1,
        dtype="fp32",
    )
    silu = ActivationConfig(kind="silu", gated=True)
    assert moe.experts == ExpertsConfig(
        num_experts=8, hidden_size=64, ffn_hidden_size=128, activation=silu, grouped=False
    )
    assert moe.capacity == CapacityConfig(factor=1.5, policy="position")
    assert (moe.shared.mlp.ffn_hidden_size, moe.shared.mlp.hidden_size, moe.shared.gate) == (96, 256, True)
    assert moe.latent_size == 64


def test_a_negative_capacity_drops_no_tokens():
    assert layer("--moe-expert-capacity-factor -1").feed_forward.capacity is None


def test_biases_are_everywhere_or_on_the_qkv_projection_alone():
    biased = layer("--add-bias-linear")
    assert (biased.mixer.qkv_bias, biased.mixer.out_bias) == (True, True)
    assert (biased.feed_forward.experts.bias, biased.feed_forward.router.linear_bias) == (True, True)
    assert layer("--add-bias-linear", 0).feed_forward.bias
    qkv = layer("--add-qkv-bias")
    assert (qkv.mixer.qkv_bias, qkv.mixer.out_bias, qkv.feed_forward.experts.bias) == (True, False, False)


@pytest.mark.parametrize(
    ("more", "config"),
    [
        ("--swiglu", ActivationConfig(kind="silu", gated=True)),
        (
            "--no-swiglu --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7",
            ActivationConfig(kind="quick_gelu", gated=True, clamp=7.0, linear_offset=1.0),
        ),
        ("--no-swiglu --geglu", ActivationConfig(kind="gelu", gated=True)),
        ("--no-swiglu --squared-relu", ActivationConfig(kind="squared_relu")),
        ("--no-swiglu --openai-gelu", ActivationConfig(kind="gelu_tanh")),
        ("--no-swiglu", ActivationConfig(kind="gelu")),
    ],
)
def test_activation_flags_choose_the_same_kind_for_dense_blocks_and_experts(more, config):
    assert layer(more, 0).feed_forward.activation == config
    assert layer(more, 1).feed_forward.experts.activation == config


def test_attention_flags_become_heads_scale_and_sinks():
    mixer = layer("--qk-layernorm --kv-channels 32 --rotary-percent 0.5 --attention-dropout 0 --softmax-type learnable")
    assert (mixer.mixer.num_heads, mixer.mixer.num_query_groups, mixer.mixer.head_dim) == (4, 2, 32)
    assert mixer.mixer.qk_norm == "per_head"
    assert mixer.mixer.rope == RopeConfig(dim=16)
    assert mixer.mixer.core.softmax_scale == pytest.approx(32**-0.5)
    assert (mixer.mixer.core.sinks, mixer.mixer.core.off_by_one, mixer.mixer.core.dropout) == (True, False, 0.0)
    assert layer("--qk-layernorm --qk-layernorm-over all-heads").mixer.qk_norm == "full"
    assert layer("--qk-l2-norm --qk-layernorm").mixer.qk_norm == "l2"
    assert layer("--softmax-type off-by-one").mixer.core.off_by_one
    assert layer("--no-group-query-attention").mixer.num_query_groups == 4


def test_windows_alternate_by_the_pattern():
    def windows(more: str) -> list[tuple[int, int] | None]:
        return [layer.mixer.core.window for layer in plan_of(more).model.layers]

    assert windows("--window-size 15,0") == [(15, 0)] * 4
    assert windows("--window-size 15,0 --window-attn-skip-freq 2") == [(15, 0), None, (15, 0), None]
    assert windows("--window-size 15,0 --window-attn-skip-freq [1,1,0,1]") == [(15, 0), (15, 0), None, (15, 0)]


def test_layers_without_rotation():
    rotates = [layer.mixer.rope is not None for layer in plan_of("--no-rope-freq 2").model.layers]
    assert rotates == [True, False, True, False]
    rotates = [layer.mixer.rope is not None for layer in plan_of("--no-rope-freq [1,0,0,0]").model.layers]
    assert rotates == [False, True, True, True]


@pytest.mark.parametrize(
    ("more", "rope"),
    [
        ("--rotary-base 1000000 --rotary-interleaved", RopeConfig(dim=64, base=1e6, interleaved=True)),
        ("--rotary-seq-len-interpolation-factor 1", RopeConfig(dim=64)),
        ("--rotary-seq-len-interpolation-factor 4", RopeConfig(dim=64, scaling="linear", scaling_factor=4.0)),
        ("--use-rope-scaling", RopeConfig(dim=64, scaling="llama3", scaling_factor=8.0, original_max_positions=8192)),
        (
            "--position-embedding-type yarn --rotary-scaling-factor 32 --yarn-original-max-position-embeddings 2048 "
            "--yarn-beta-fast 16 --no-yarn-correction-range-round-to-int",
            RopeConfig(
                dim=64, scaling="yarn", scaling_factor=32.0, original_max_positions=2048, beta_fast=16.0, truncate=False
            ),
        ),
    ],
)
def test_rotary_flags_become_one_rotation(more, rope):
    assert layer(more).mixer.rope == rope


@pytest.mark.parametrize(
    ("more", "kind", "rotates"),
    [
        ("--position-embedding-type rope", "rope", True),
        ("--position-embedding-type yarn", "rope", True),
        ("--position-embedding-type none", "none", False),
        ("--position-embedding-type learned_absolute", "learned_absolute", False),
    ],
)
def test_positions_are_learned_rotary_or_absent(more, kind, rotates):
    model = plan_of(more).model
    assert model.position_embedding == kind
    assert (model.layers[0].mixer.rope is not None) == rotates
    assert model.max_positions == 128


def test_latent_attention_of_deepseek_v3():
    mixer = layer(
        f"{MLA} --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
        "--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --qk-layernorm --norm-epsilon 1e-6"
    ).mixer
    assert isinstance(mixer, MLAConfig)
    assert mixer.rope == RopeConfig(
        dim=64, interleaved=True, scaling="yarn", scaling_factor=40.0, original_max_positions=4096, mscale_all_dim=1.0
    )
    gain = 0.1 * math.log(40) + 1
    assert mixer.core.softmax_scale == pytest.approx(gain**2 / math.sqrt(192), rel=1e-15)
    assert (mixer.q_lora_rank, mixer.kv_lora_rank, mixer.qk_norm) == (1536, 512, True)
    assert mixer.norm == NormConfig(kind="RMSNorm", eps=1e-6)


def test_latent_attention_with_plain_rope():
    mixer = layer(f"{MLA} --rope-type rope --rotary-scaling-factor 40").mixer
    assert mixer.rope == RopeConfig(dim=64, interleaved=True)
    assert mixer.core.softmax_scale == pytest.approx(192**-0.5)


def exchanges(more: str) -> list[str]:
    model = plan_of(f"--context-parallel-size 4 --global-batch-size 32 {more}", environ=EIGHT_RANKS).model
    return [layer.mixer.core.context_exchange for layer in model.layers]


def test_context_parallel_ranks_exchange_in_one_way_or_in_one_per_layer():
    assert exchanges("") == ["p2p"] * 4
    assert exchanges("--cp-comm-type all_gather") == ["allgather"] * 4
    assert exchanges("--cp-comm-type a2a p2p allgather p2p") == ["a2a", "p2p", "allgather", "p2p"]


def test_two_levels_of_context_parallelism_are_there_where_a_layer_uses_them():
    sizes = "--context-parallel-size 4 --global-batch-size 32 --hierarchical-context-parallel-sizes 4 1"
    assert plan_of(f"{sizes} --cp-comm-type a2a+p2p", environ=EIGHT_RANKS).parallel.cp_sub_axes == (4, 1)
    assert plan_of(sizes, environ=EIGHT_RANKS).parallel.cp_sub_axes is None
    assert plan_of("--cp-comm-type a2a+p2p").parallel.cp_sub_axes is None


def test_dynamic_context_parallelism_has_its_limit():
    sizes, limit = "--context-parallel-size 4 --global-batch-size 32", "--max-seqlen-per-dp-cp-rank 64"
    for flags, found in ((f"--hybrid-context-parallel {limit}", 64), ("--dynamic-context-parallel", 32), (limit, None)):
        assert plan_of(f"{sizes} {flags}", environ=EIGHT_RANKS).parallel.max_seqlen_per_dp_cp_rank == found


def test_masking_between_documents_also_resets_positions():
    data = plan_of("--dataloader-inter-document-masking").data
    assert (data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss) == (True, True, False)


def test_norms_initial_values_and_dropout():
    model = plan_of("--apply-layernorm-1p --norm-epsilon 1e-6 --init-method-std 0.01 --hidden-dropout 0.2").model
    assert model.norm == NormConfig(kind="RMSNorm", eps=1e-6, zero_centered=True)
    assert model.layers[0].norm == model.norm
    assert model.init == InitConfig(std=0.01, output_std=0.01 / math.sqrt(8))
    assert (model.embedding_dropout, model.layers[0].hidden_dropout) == (0.2, 0.2)
    assert plan_of("--init-method unit_gain --embedding-init-method-std 1").model.init == InitConfig(
        std=0.02, output_std=0.02 / math.sqrt(8), embedding_std=1.0, method="unit_gain"
    )


def test_a_head_fused_with_the_loss_computes_logits_in_chunks():
    linear = "--cross-entropy-fusion-impl linear"
    assert plan_of(linear).model.loss_chunk is None
    assert plan_of(f"--cross-entropy-loss-fusion {linear}").model.loss_chunk == 1024
    assert plan_of("--cross-entropy-loss-fusion").model.loss_chunk is None


def test_multi_token_prediction():
    assert plan_of().model.mtp is None
    assert plan_of("--mtp-num-layers 0").model.mtp is None
    config = plan_of("--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3 --mtp-detach-heads").model.mtp
    assert config == MTPConfig(num_layers=2, loss_scaling_factor=0.3, detach_heads=True)


def test_too_few_vocabulary_rows_are_rejected():
    (problem,) = problems_of("--padded-vocab-size 999")
    assert problem.what == "--padded-vocab-size 999 is smaller than the tokenizer's vocabulary of 1000 tokens"
    assert plan_of("--padded-vocab-size 1000").model.vocab_size == 1000


def test_the_vocabulary_is_padded():
    assert plan_of("--vocab-size 1000").model.vocab_size == 1024
    assert plan_of("--vocab-size 1000 --make-vocab-size-divisible-by 7").model.vocab_size == 1001
    assert plan_of("--vocab-size 1000 --padded-vocab-size 2000").model.vocab_size == 2000
    assert plan_of("--vocab-size 1000 --no-pad-vocab-size").model.vocab_size == 1000
    assert plan_of("--vocab-size 1000").data.vocab_size == 1000


def test_vocabulary_size_comes_from_the_tokenizer():
    requests = []

    def ask(config: TokenizerConfig) -> int:
        requests.append(config)
        return 77

    assert read_plan(words(SMALL), {}, ask).data.vocab_size == 77
    assert requests == [TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=Path("x.model"))]
    assert read_plan([*words(SMALL), "--vocab-size", "9"], {}).data.vocab_size == 9
    with pytest.raises(FlagErrors, match="the vocabulary size is not known"):
        read_plan(words(SMALL), {})


def test_a_vocabulary_smaller_than_the_tokenizers_is_rejected_and_a_larger_one_is_noted():
    assert texts_of("--vocab-size 999") == [
        "--vocab-size 999 is smaller than the tokenizer's vocabulary of 1000 tokens"
    ]
    plan = plan_of("--vocab-size 2000")
    assert (plan.data.vocab_size, plan.model.vocab_size) == (2000, 2048)
    assert "--vocab-size 2000 is larger than the tokenizer's vocabulary of 1000 tokens" in plan.notes
    assert not any("vocab" in note for note in (*plan_of("--vocab-size 1000").notes, *plan_of().notes))


@pytest.mark.parametrize("kind", ["GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_names_of_sentencepiece_tokenizers_mean_the_same(kind):
    assert plan_of(f"--tokenizer-type {kind}").data.tokenizer.tokenizer_type == "SentencePieceTokenizer"


def test_lengths_in_iterations_become_samples():
    lr = plan_of("--lr-decay-iters 100").lr_schedule
    assert (lr.warmup_samples, lr.decay_samples, lr.weight_decay_samples) == (320, 1600, 3200)
    for fraction, warmup in ((0.25, 400), (0.001, 1.6)):
        lr = plan_of(f"--lr-warmup-fraction {fraction} --lr-decay-iters 100", "--lr-warmup-iters").lr_schedule
        assert lr.warmup_samples == warmup
    lr = plan_of("--lr-decay-style WSD --lr-wsd-decay-iters 50 --lr-wsd-decay-style minus_sqrt").lr_schedule
    assert (lr.decay_samples, lr.wsd_decay_samples, lr.wsd_style) == (3200, 800, "minus_sqrt")


def test_lengths_in_samples_stay():
    plan = plan_of(
        "--train-samples 3210 --lr-decay-samples 3000 --lr-warmup-samples 17 --lr-decay-style WSD "
        "--lr-wsd-decay-samples 33",
        ITERS,
    )
    lr = plan.lr_schedule
    assert (lr.warmup_samples, lr.decay_samples, lr.wsd_decay_samples, lr.weight_decay_samples) == (17, 3000, 33, 3210)
    assert (plan.loop.train_iters, plan.loop.train_samples) == (200, 3210)
    assert plan_of("--train-samples 3210", ITERS).lr_schedule.decay_samples == 3210


def test_weight_decay_is_constant_or_grows():
    lr = plan_of("--weight-decay 0.1").lr_schedule
    assert (lr.start_weight_decay, lr.end_weight_decay, lr.weight_decay_style) == (0.1, 0.1, "constant")
    lr = plan_of("--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.2").lr_schedule
    assert (lr.start_weight_decay, lr.end_weight_decay, lr.weight_decay_style) == (0.0, 0.2, "cosine")


def test_default_batch_is_one_microbatch_per_rank():
    assert plan_of(without="--global-batch-size").batch == BatchConfig(micro_batch_size=4, global_batch_size=4)
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert plan_of(without="--global-batch-size", environ=environ).batch.global_batch_size == 8


def test_a_growing_batch_is_combined_with_a_number_of_iterations():
    """The learning-rate schedule counts full batches during the ramp-up, as in Megatron."""
    plan = plan_of("--rampup-batch-size 4 4 60")
    assert (plan.batch.rampup_batch_size, plan.loop.train_iters, plan.loop.train_samples) == ((4, 4, 60), 200, None)
    assert plan.lr_schedule.decay_samples == 200 * 16


def test_graphs_compute_at_least_one_step_first():
    steps = [plan_of(f"--cuda-graph-warmup-steps {number}").cuda_graphs.cuda_graph_warmup_steps for number in (0, 1, 2)]
    assert steps == [1, 1, 2]


def test_layers_to_recompute_have_no_effect_without_a_granularity():
    assert plan_of("--recompute-num-layers 2 --recompute-method block").memory.recompute.recompute_method is None


@pytest.mark.parametrize(
    ("more", "config"),
    [
        ("", PrecisionConfig()),
        ("--bf16", PrecisionConfig(params="bf16")),
        (
            "--bf16 --fp4-format e2m1 --use-distributed-optimizer --fp4-param-gather",
            PrecisionConfig(params="bf16", low_precision=low_precision_config("nvfp4"), low_precision_params=True),
        ),
        (
            "--fp64 --deterministic-mode",
            PrecisionConfig(params="fp64", grads="fp64", main_params_dtype="fp64", deterministic_mode=True),
        ),
    ],
)
def test_format_flags_choose_parameters_gradients_and_master_weights(more, config):
    assert plan_of(more).precision == config


def test_default_checkpoint_folder_is_in_the_run_folder():
    assert plan_of().checkpoint.save == Path("runs/a/checkpoints")
    checkpoint = plan_of("--save x --load hf:y --no-load-optim --ckpt-step 3 --fresh --finetune").checkpoint
    assert (checkpoint.save, checkpoint.load, checkpoint.save_interval) == (Path("x"), "hf:y", 100)
    assert (checkpoint.load_optim, checkpoint.save_optim) == (False, True)
    assert not plan_of("--no-save-optim").checkpoint.save_optim
    assert (checkpoint.ckpt_step, checkpoint.fresh, checkpoint.finetune) == (3, True, True)
    assert plan_of(without="--run-dir").checkpoint.save is None


def test_a_run_on_mock_data_saves_checkpoints_only_on_request():
    plan = plan_of("--mock-data", without="--save-interval")
    assert plan.checkpoint.save is None
    assert "mock data: no checkpoint is saved without --save or --save-interval" in plan.notes
    assert plan_of(without="--save-interval").checkpoint.save == Path("runs/a/checkpoints")
    for more in ("--save-interval 5", "--save-interval 5 --save runs/a/checkpoints", "--ckpt-step 3"):
        plan = plan_of(f"--mock-data {more}", without="--save-interval")
        assert plan.checkpoint.save == Path("runs/a/checkpoints")
        assert not any("no checkpoint" in note for note in plan.notes)


def test_default_eval_iters_on_mock_data_are_at_most_train_iters():
    assert plan_of(without="--eval-iters").loop.eval_iters == 100
    assert plan_of("--mock-data", without="--eval-iters").loop.eval_iters == 100
    short = "--mock-data --train-iters 3 --lr-warmup-iters 1"
    assert plan_of(short, without="--eval-iters").loop.eval_iters == 3
    assert plan_of(f"{short} --eval-iters 20").loop.eval_iters == 20
    assert plan_of("--skip-train").checkpoint.skip_train and not plan_of().checkpoint.skip_train


def test_upcycling_loads_weights_only():
    checkpoint = plan_of("--moe-use-upcycling --moe-upcycling-granularity 4 --load dense").checkpoint
    assert (checkpoint.moe_use_upcycling, checkpoint.moe_upcycling_granularity) == (True, 4)
    assert not checkpoint.load_optim


def test_data_and_logging():
    plan = plan_of(
        "--data-path 0.3 a 0.7 b --data-cache-path c --no-mmap-bin-files --num-workers 0 --reset-position-ids "
        "--reset-attention-mask --eod-mask-loss --dataloader-type cyclic --seed 7 --log-style short --log-throughput "
        "--tensorboard-dir t --wandb-project p --wandb-exp-name e --timing-log-level 2 --no-progress-bar",
        "--split",
    )
    data, logging = plan.data, plan.logging
    assert (data.data_path, data.split, data.data_cache_path) == (("0.3", "a", "0.7", "b"), "969, 30, 1", Path("c"))
    assert (data.mmap_bin_files, data.num_workers, data.dataloader_type, data.seed) == (False, 0, "cyclic", 7)
    assert (data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss) == (True, True, True)
    assert (logging.log_style, logging.log_throughput, logging.tensorboard_dir) == ("short", True, Path("t"))
    assert (logging.wandb_project, logging.wandb_exp_name, logging.timing_log_level) == ("p", "e", 2)
    assert (logging.run_dir, logging.log_interval, logging.progress_bar) == (Path("runs/a"), 10, False)
    assert plan.loop.seed == 7


def test_optimizer_loop_and_kernels():
    plan = plan_of(
        "--adam-beta2 0.95 --clip-grad 0.5 --apply-wd-to-qk-layernorm --decoupled-lr 1e-2 --decoupled-min-lr 1e-3 "
        "--exit-interval 5 --exit-duration-in-mins 30 --calculate-per-token-loss --skip-train --manual-gc "
        "--no-check-for-nan-in-loss-and-grad --kernel-backend reference --kernel-per-op rms_norm=torch_native "
        "--device cpu --overlap-optimizer-step"
    )
    optimizer, loop = plan.optimizer, plan.loop
    assert optimizer.overlap_optimizer_step and not plan_of().optimizer.overlap_optimizer_step
    assert (optimizer.adam_beta2, optimizer.clip_grad, optimizer.apply_wd_to_qk_layernorm) == (0.95, 0.5, True)
    assert (optimizer.decoupled_lr, optimizer.decoupled_min_lr) == (1e-2, 1e-3)
    assert (loop.exit_interval, loop.exit_duration_in_mins) == (5, 30.0)
    assert loop.calculate_per_token_loss and loop.skip_train and not loop.check_for_nan_in_loss_and_grad
    assert (loop.eval_interval, loop.eval_iters, loop.manual_gc) == (50, 4, True)
    assert plan.kernels.kernel_backend == "reference"
    assert plan.kernels.kernel_per_op == (("rms_norm", "torch_native"),)
    assert plan.device == "cpu"


@pytest.mark.parametrize("row", zoo_rows(), ids=str)
def test_flags_of_public_models_give_their_parameter_counts(row):
    model = read_plan(command_line(row), {}).model
    total = count_parameters(model).without_mtp.total
    active = count_parameters(model, active=True).without_mtp.total
    assert f"{total / 1e9:.2f}" == row.cells["computed-total-B"]
    assert f"{active / 1e9:.2f}" == row.cells["computed-active-B"]


def test_data_parallel_flags_reach_the_config():
    assert plan_of().data_parallel == DataParallelConfig()
    words = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000"
    words += " --ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective --grad-reduce-in-bf16 --bf16"
    words += " --ddp-reduce-scatter-with-fp32-accumulation --global-batch-size 32"
    plan = plan_of(words, environ=EIGHT_RANKS)
    assert plan.data_parallel == DataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        ddp_bucket_size=1000,
        ddp_pad_buckets_for_high_nccl_busbw=True,
        ddp_average_in_collective=True,
        ddp_reduce_scatter_with_fp32_accumulation=True,
    )
    assert plan.precision.grads == "bf16"
    assert plan_of("--ddp-num-buckets 3").data_parallel.ddp_num_buckets == 3


def test_overlap_is_disabled_without_communication():
    """Otherwise recipes for many ranks could not be captured as full iterations on one rank."""
    still = "--attention-dropout 0 --hidden-dropout 0"
    for impl in ("full_iteration", "local"):
        plan = plan_of(f"{still} --cuda-graph-impl {impl} {OVERLAP}")
        assert plan.data_parallel == DataParallelConfig(use_distributed_optimizer=True)
    heads = "--no-group-query-attention --num-attention-heads 8"
    for ranks in (  # replicas of all parameters, then of the experts only
        "--context-parallel-size 8",
        "--tensor-model-parallel-size 8 --sequence-parallel --expert-tensor-parallel-size 1",
    ):
        config = plan_of(f"{OVERLAP} {heads} {ranks}", environ=EIGHT_RANKS).data_parallel
        assert config.overlap_grad_reduce and config.overlap_param_gather


def test_layers_are_placed_by_a_layout_or_evenly():
    assert str(plan_of().layout) == "Et*4L"
    assert plan_of("--pipeline-model-parallel-layout E,t*2,ttL").layout == plan_of().layout
    assert plan_of("--pipeline-model-parallel-layout auto").layout == plan_of().layout
    assert plan_of("--mtp-num-layers 1").layout.stages[0].num_mtp == 1


def test_the_schedule_of_a_step_follows_from_the_flags():
    schedule = plan_of("--microbatch-group-size-per-virtual-pipeline-stage 3").pipeline_schedule(7)
    assert (schedule.num_microbatches, schedule.pp, schedule.vpp, schedule.group_size) == (7, 1, 1, 3)
    assert plan_of().pipeline_schedule(4, forward_only=True).forward_only
    assert not plan_of().pipeline_schedule(4).split_backward
    assert plan_of("--delay-wgrad-compute").pipeline_schedule(4).split_backward


def test_microbatches_overlap_only_with_expert_communication():
    pairs = "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall"
    assert not plan_of(pairs).pipeline_schedule(4).overlap, "one rank has all experts"
    words = f"{pairs} --expert-model-parallel-size 2 --ep-overlap-early-attn-memory-release --global-batch-size 8"
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    plan = plan_of(words, environ=environ)
    assert plan.pipeline_schedule(4).overlap and plan.pipeline.ep_overlap_early_attn_memory_release


def test_flags_of_data_model_and_training_loop():
    plan = plan_of(
        "--tokenizer-type NullTokenizer --vocab-size 99 --null-tokenizer-eod-id 5 --null-tokenizer-pad-id 6 "
        "--full-validation --mid-level-dataset-surplus 0.01 --iterations-to-skip 3 7 --init-method-xavier-uniform "
        "--apply-residual-connection-post-layernorm"
    )
    assert (plan.data.tokenizer.null_tokenizer_eod_id, plan.data.tokenizer.null_tokenizer_pad_id) == (5, 6)
    assert (plan.data.full_validation, plan.data.mid_level_dataset_surplus) == (True, 0.01)
    assert plan.loop.iterations_to_skip == (3, 7)
    logging = plan_of("--log-memory-interval 5 --log-device-memory-used").logging
    assert (logging.log_memory_interval, logging.log_device_memory_used) == (5, True)
    assert plan.model.init.method == "xavier_uniform"
    assert all(layer.residual == AddedResidual(from_norm=True) for layer in plan.model.layers)


def test_residual_connections():
    sizes = "--num-residual-streams 3 --mhc-sinkhorn-iterations 7 --mhc-init-gating-factor 0.5 --norm-epsilon 1e-6"
    expected = HyperConnectionsConfig(num_streams=3, sinkhorn_iterations=7, init_gating_factor=0.5, norm_eps=1e-6)
    for switch in ("--enable-mhc-connections", "--residual-connection hyper_connections"):
        assert {layer.residual for layer in plan_of(f"{switch} {sizes}").model.layers} == {expected}
    assert {layer.residual for layer in plan_of(sizes).model.layers} == {AddedResidual()}


def test_hash_layers_are_the_first_layers():
    router = "--moe-layer-freq 1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    plan = plan_of(f"--moe-n-hash-layers 1 {router} --padded-vocab-size 1024")
    first, *others = (layer.moe.router for layer in plan.model.layers)
    assert (first.hash_vocab_size, first.expert_bias) == (1024, False)
    assert others and all((each.hash_vocab_size, each.expert_bias) == (None, True) for each in others)


def test_the_two_files_of_gpt2():
    files = "--vocab-file v.json --merge-file m.txt"
    config = plan_of(f"--tokenizer-type GPT2BPETokenizer {files}").data.tokenizer
    assert plan_of(files, without="--tokenizer-type --tokenizer-model").data.tokenizer == replace(
        config, tokenizer_model=None
    )
    assert plan_of(files).data.tokenizer.tokenizer_type == "SentencePieceTokenizer", "a type that is given counts"
    assert config.tokenizer_type == "GPT2BPETokenizer"
    assert (str(config.vocab_file), str(config.merge_file)) == ("v.json", "m.txt")


def test_too_large_numbers_are_rejected_or_clamped():
    assert texts_of(f"--seed {2**32}") == [f"--seed {2**32} is not less than 4.29497e+09"]
    assert plan_of(f"--seed {2**32 - 1}").loop.seed == 2**32 - 1
    waits = dict(plan_of(f"--step-deadline {10**30} --exit-deadline 7").resilience.watchdog)
    assert (waits["step"], waits["evaluation"], waits["exit"]) == (1e9, 1e9, 7.0)


@pytest.mark.parametrize(
    ("more", "sentence"), [("--emulate-rank ²", "not a rank of a world"), ("--emulate-plot a.xyz", "not a PNG")]
)
def test_unsupported_emulations_are_rejected(more, sentence):
    (text,) = texts_of(f"--fake-init-process-group {more}")
    assert sentence in text


@pytest.mark.parametrize(
    "more, experts",
    [
        ("--bf16", "moe"),
        *((more, "moe_router") for more in ("", "--bf16 --no-moe-grouped-gemm", "--bf16 --moe-paged-stash")),
        ("--bf16 --moe-expert-wgrad-interval 2", "moe_router"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "moe"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe tensorwise", "moe"),
        ("--bf16 --fp4-format e2m1 --emulate-low-precision", "moe"),
    ],
)
def test_experts_are_captured_without_host_reads_and_pages(more, experts):
    assert plan_of(f"{GRAPHS} {more}").cuda_graphs.cuda_graph_modules == ("attn", "mlp", experts)
    assert plan_of(f"{GRAPHS} {more} --moe-layer-freq 1").cuda_graphs.cuda_graph_modules == ("attn", experts)


@pytest.mark.parametrize(("ranks_per_host", "experts"), [("8", "moe"), ("1", "moe_router")])
@pytest.mark.parametrize("dispatcher", ["flex", "alltoall"])
def test_experts_over_ranks_are_captured_on_one_host(dispatcher, ranks_per_host, experts):
    flags = f"{GRAPHS} --bf16 --expert-model-parallel-size 2 --moe-token-dispatcher-type {dispatcher}"
    ranks = {**EIGHT_RANKS, "LOCAL_WORLD_SIZE": ranks_per_host}
    assert plan_of(f"{flags} --global-batch-size 32", environ=ranks).cuda_graphs.cuda_graph_modules[-1] == experts


def test_experts_over_a_library_are_captured_only_on_request():
    flags = f"{GRAPHS} --bf16 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex --global-batch-size 32"
    plan = plan_of(f"{flags} --moe-flex-dispatcher-backend hybridep", environ=EIGHT_RANKS)
    assert plan.cuda_graphs.cuda_graph_modules == ("attn", "mlp", "moe_router")


def test_weight_gradients_overlap_with_exchanges_only_where_tokens_are_exchanged():
    flag = "--overlap-dispatch-backward-with-experts-wgrad"
    assert not plan_of(flag).pipeline.overlap_dispatch_backward_with_experts_wgrad
    over_two = plan_of(f"{flag} --expert-model-parallel-size 2 --global-batch-size 32", environ=EIGHT_RANKS)
    assert over_two.pipeline.overlap_dispatch_backward_with_experts_wgrad
    assert plan_of("--high-priority-a2a-comm-stream").parallel.high_priority_a2a_comm_stream
