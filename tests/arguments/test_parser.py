"""Parsing of command lines: spellings of flags, precedence of sources, notes and errors."""

import pytest

from arguments.checks.run import missing_flags
from arguments.flag import REQUIRED, Flag, docstrings, flag, flags_of
from arguments.flags import GROUPS, Registry
from arguments.groups.moe import MoEFlags
from arguments.parser import merge_settings, split
from arguments.values import type_name
from tests.helpers.command_lines import plan_of, problems_of, texts_of

REGISTRY = Registry.declared()


def settings_of(*layers: str):
    given = [split(layer.split()) for layer in layers]
    settings = merge_settings(REGISTRY, [words for words, _ in given])
    settings.problems += [problem for _, problems in given for problem in problems]
    return settings


def value_of(name: str, *layers: str):
    settings = settings_of(*layers)
    assert not settings.problems, settings.problems
    return settings.setting(name).value


@pytest.mark.parametrize(
    ("name", "words", "value"),
    [
        ("num_layers", "--num-layers 3", 3),
        ("num_layers", "--num-layers=3", 3),
        ("num_layers", "--num_layers 3", 3),
        ("swiglu", "--swiglu", True),
        ("swiglu", "--swiglu --no-swiglu", False),
        ("swiglu", "--swiglu=false", False),
        ("add_bias_linear", "--disable-bias-linear", False),
        ("add_bias_linear", "--no-add-bias-linear", False),
        ("add_bias_linear", "--disable-bias-linear=false", True),
        ("load_optim", "--no-load-optim", False),
        ("check_for_nan_in_loss_and_grad", "--no-check-for-nan-in-loss-and-grad", False),
        ("add_position_embedding", "--no-position-embedding", False),
        ("untie_embeddings_and_output_weights", "--untie-embeddings-and-output-weights", True),
        ("moe_expert_capacity_factor", "--moe-expert-capacity-factor -1.0", -1.0),
        ("window_size", "--window-size -1,0", (-1, 0)),
        ("data_path", "--data-path 0.3 a 0.7 b --lr 1", ("0.3", "a", "0.7", "b")),
        ("save_interval", "--persistent-save-interval 7", 7),
        ("override_opt_param_scheduler", "--override-opt_param-scheduler", True),
        ("override_opt_param_scheduler", "--override-opt-param-scheduler", True),
        ("fake_process_group", "--fake-init-process-group", True),
        ("gpu", "--gpu H100", "h100"),
        ("gpu", "--gpu VR200", "vr200"),
        ("gpu", "--gpu a100", "a100"),
        ("gpu", "--gpu gh200", "gh200"),
    ],
)
def test_every_spelling_sets_its_flag(name, words, value):
    assert value_of(name, words) == value


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("--bf16 --lr 1", "'--bf16 --lr 1' is one argument that contains blanks"),
        ("--bf16 ", "'--bf16 ' is one argument that contains blanks"),
        (" --bf16", "' --bf16' is one argument that contains blanks"),
        ("--bf16\r", "'--bf16\\r' ends with a carriage return"),
        ("\u2013bf16", "starts with the dash U+2013 instead of two hyphens"),
        ("-\u2014bf16", "starts with the dash U+2014 instead of two hyphens"),
    ],
)
def test_flag_mangled_by_shell_or_clipboard_is_reported_and_corrected(word, problem):
    given, problems = split(["--num-layers", "4", word])
    assert len(problems) == 1, problems
    assert problem in problems[0].what
    assert merge_settings(REGISTRY, [given]).setting("bf16").value is True
    assert merge_settings(REGISTRY, [given]).setting("num_layers").value == 4


@pytest.mark.parametrize("word", [" ", "\\", "\r", "${GPT_ARGS[@]}"])
def test_stray_words_are_reported_and_not_used_as_values(word):
    given, problems = split(["--num-layers", "4", word, word])
    assert len(problems) == 1, problems
    assert merge_settings(REGISTRY, [given]).setting("num_layers").value == 4


def test_blanks_and_dashes_in_values_are_kept():
    words = [
        "--wandb-exp-name=my run",
        "--wandb-project",
        "a \u2013 b",
        "--run-dir",
        "runs/\u2013x",
        "--eval-iters",
        "\u22121",
    ]
    given, problems = split(words)
    assert problems == []
    assert [each.words for each in given] == [("my run",), ("a \u2013 b",), ("runs/\u2013x",), ("\u22121",)]


@pytest.mark.parametrize(
    ("name", "words", "value"),
    [
        ("position_embedding_type", "--use-rotary-position-embeddings", "rope"),
        ("recompute_granularity", "--recompute-activations", "selective"),
        ("recompute_modules", "--moe-layer-recompute", ("core_attn", "moe")),
        ("recompute_modules", "--moe-layer-recompute --recompute-activations", ("core_attn", "moe")),
        ("recompute_modules", "--moe-layer-recompute --recompute-modules mlp moe_act", ("mlp", "moe_act", "moe")),
        ("recompute_granularity", "--moe-layer-recompute", "selective"),
        ("position_embedding_type", "--enable-gpt-oss", "yarn"),
        ("rotary_scaling_factor", "--enable-gpt-oss", 32.0),
        ("yarn_correction_range_round_to_int", "--enable-gpt-oss", False),
        ("inject", "--error-injection-rate 7", ("nan-once@0:7",)),
        ("inject", "--error-injection-rate 7 --error-injection-type persistent_error", ("nan-loss@0:7",)),
        ("inject", "--error-injection-rate 7 --inject kill@0:3", ("kill@0:3", "nan-once@0:7")),
        ("moe_token_dispatcher_type", "--moe-enable-deepep", "flex"),
        ("moe_flex_dispatcher_backend", "--moe-enable-deepep", "deepep"),
        ("moe_flex_dispatcher_num_sms", "--moe-deepep-num-sms 24", 24),
        ("moe_flex_dispatcher_num_sms", "--moe-hybridep-num-sms 16", 16),
        ("apply_wd_to_qk_layernorm", "--no-weight-decay-cond-type qwen3_next", True),
        ("cuda_graph_modules", "--cuda-graph-scope attn moe_router", ("attn", "moe_router")),
        ("cuda_graph_impl", "--external-cuda-graph", "transformer_engine"),
        ("cuda_graph_modules", "--cuda-graph-scope full --cuda-graph-impl local", ()),
        ("cuda_graph_impl", "--cuda-graph-scope full --cuda-graph-impl local", "local"),
        ("cuda_graph_impl", "--cuda-graph-scope full_iteration --cuda-graph-impl local", "full_iteration"),
        ("cuda_graph_modules", "--cuda-graph-scope full_iteration --cuda-graph-impl local", ()),
        ("moe_expert_capacity_factor", "--moe-token-capacity-factor 1.0", 1.0),
        ("micro_batch_size", "--batch-size 2", 2),
        ("mixer", "--hybrid-override-pattern M*", ("mamba", "auto")),
        ("qk_head_dim", "--qk-nope-head-dim 96", 96),
    ],
)
def test_a_deprecated_name_sets_the_current_flag_with_a_note(name, words, value):
    settings = settings_of(words)
    assert settings.setting(name).value == value
    assert any(note.startswith(words.split()[0]) for note in settings.notes)


@pytest.mark.parametrize(
    "words",
    [
        "--moe-enable-deepep --moe-flex-dispatcher-backend hybridep",
        "--moe-flex-dispatcher-num-sms 16 --moe-deepep-num-sms 24",
        "--moe-hybridep-num-sms 16 --moe-flex-dispatcher-num-sms 24",
        "--moe-hybridep-num-sms 16 --moe-deepep-num-sms 24",
    ],
)
def test_deprecated_dispatcher_names_must_not_contradict_other_flags(words):
    (problem,) = settings_of(words).problems
    assert problem.what.endswith("remove one of them") or "; give only one of --moe" in problem.what
    same = words.replace("backend hybridep", "backend deepep").replace("24", "16")
    assert settings_of(same).problems == []


def test_a_deprecated_switch_that_is_off_has_no_effect():
    assert value_of("moe_token_dispatcher_type", "--moe-enable-deepep=false") == "allgather"
    assert value_of("recompute_modules", "--moe-layer-recompute=false") is None
    assert value_of("inject", "--error-injection-rate 0") == ()


def test_modules_are_added_to_those_of_earlier_layers_without_a_note_of_two_values():
    settings = settings_of("--recompute-modules mlp", "--moe-layer-recompute --recompute-modules moe_act")
    assert settings.setting("recompute_modules").value == ("moe_act", "moe")
    assert value_of("recompute_modules", "--recompute-modules mlp", "--moe-layer-recompute") == ("mlp", "moe")
    assert not any("twice" in note for note in settings.notes)


def test_adding_a_module_to_whole_layers_is_rejected():
    (problem,) = settings_of("--moe-layer-recompute --recompute-granularity full").problems
    assert "--recompute-granularity is full" in problem.what


def test_a_flag_of_another_program_is_rejected_with_an_alternative():
    assert "use --padded-vocab-size" in settings_of("--extra-vocab-size 421").problems[0].what


def test_a_deprecated_name_with_an_invalid_value_is_rejected():
    assert "qwen3_next" in settings_of("--no-weight-decay-cond-type length").problems[0].what
    assert "cannot be combined with modules" in settings_of("--cuda-graph-scope full_iteration attn").problems[0].what


def test_a_later_layer_overrides_a_deprecated_name():
    settings = settings_of("--cuda-graph-scope full_iteration", "--cuda-graph-impl none")
    assert settings.setting("cuda_graph_impl").value == "none"


def test_later_layers_override_silently_and_repetition_within_one_is_noted():
    settings = settings_of("--lr 1 --num-layers 2", "--lr 2")
    assert settings.setting("lr").value == 2
    assert settings.setting("num_layers").value == 2
    assert not settings.notes
    settings = settings_of("--lr 1 --lr 2")
    assert settings.setting("lr").value == 2
    assert settings.notes == [
        "--lr is given twice: 1.0 (command line), then 2.0 (command line); the last value is used"
    ]
    assert not settings_of("--lr 1 --lr 1.0").notes


def test_an_unknown_flag_is_rejected_with_similar_names():
    (problem,) = settings_of("--moe-router-topl 2").problems
    assert problem.what == "--moe-router-topl is not a flag (command line)"
    assert problem.remedy.startswith("did you mean --moe-router-topk")
    assert problem.remedy.count("--") <= 3


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("--numlayers", "--num-layers or --mtp-num-layers"),
        ("--dropout", "--hidden-dropout"),
        ("--learning-rate", ""),
        ("--epochs", ""),
        ("--b", ""),
    ],
)
def test_only_similar_names_are_suggested(option, names):
    (problem,) = settings_of(f"{option} 2").problems
    assert problem.remedy.startswith(f"did you mean {names}" if names else "search with --find WORD"), problem.remedy


def test_a_misspelled_required_flag_is_not_reported_as_missing():
    settings = settings_of("--hidden-sze 64")
    assert [problem.what for problem in settings.problems] == ["--hidden-sze is not a flag (command line)"]
    missing = [problem.what for problem in missing_flags(settings)]
    assert "--num-layers is required" in missing and "--hidden-size is required" not in missing


def test_an_abbreviation_is_not_a_flag():
    assert settings_of("--num-exp 8").problems


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layers", "--num-layers needs a value"),
        ("--num-layers=", "--num-layers needs a value"),
        ("--lr=", "--lr needs a value"),
        ("--config", "--config needs a value"),
        ("--num-layers 2 3", "--num-layers 2 3 takes one value, not 2"),
        ("--swiglu 3", "--swiglu 3 takes no value"),
        ("--num-layers 0", "--num-layers 0 is less than 1"),
        ("--recompute-modules mlp router", "--recompute-modules mlp router has router, which is not one of core_attn,"),
        ("--offload-modules router", "--offload-modules router is not one of attn_norm,"),
        ("--num-layers 999999999999999999999", "999999999999999999999 is not less than 100000"),
        ("--optimizer soap", "--optimizer soap is not available, because computing eigenvectors"),
        ("--hidden-dropout 1", "--hidden-dropout 1 is not less than 1"),
        ("--moe-router-dtype bf16", "--moe-router-dtype bf16 is not one of fp32, fp64"),
        ("stray --lr 1", "'stray' does not follow a flag"),
    ],
)
def test_an_invalid_value_is_reported(words, message):
    assert message in settings_of(words).problems[0].what


@pytest.mark.parametrize(
    ("refused", "report", "equivalent"),
    [
        (
            "--optimizer soap",
            "--optimizer soap is not available, because computing eigenvectors costs more than Newton-Schulz "
            "iterations; use muon",
            "--optimizer muon",
        ),
        (
            "--use-torch-fsdp2",
            "--use-torch-fsdp2 is not available (command line) Try: use --use-megatron-fsdp "
            "--data-parallel-sharding-strategy optim_grads_params",
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
        ),
    ],
)
def test_a_refused_feature_is_one_sentence_with_an_equivalent_that_starts(refused, report, equivalent):
    (problem,) = problems_of(refused)
    assert " ".join(" ".join(problem.lines()).split()).startswith(report)
    assert problems_of(equivalent) == ()


def test_all_problems_are_reported_at_once_and_rules_on_invalid_values_are_skipped():
    texts = texts_of("--hidden-size x --no-such-flag --moe-router-topk 9 --fp32-residual-connection")
    assert [text.split(" ")[0] for text in texts] == [
        "--hidden-size",
        "--no-such-flag",
        "--moe-router-topk",
        "--fp32-residual-connection",
    ]


def test_the_report_numbers_problems_and_shows_the_origin_of_values():
    (problem,) = problems_of("--moe-router-topk 9")
    lines = problem.lines()
    assert lines[0] == "--moe-router-topk 9 exceeds 8 experts"
    assert "--moe-router-topk  9" in lines[2]
    assert "(command line)" in lines[2]
    assert lines[3].startswith("  Why: ")
    assert lines[4] == "  Try: --moe-router-topk 8 or less"


def test_missing_required_flags_are_reported():
    assert texts_of(without="--num-layers --lr") == ["--num-layers is required", "--lr is required"]


def test_two_flags_may_not_share_a_spelling():
    entries = list(flags_of("moe", MoEFlags))
    with pytest.raises(AssertionError, match="declared twice"):
        Registry.of_flags([*entries, entries[0]])
    clash = Flag("x", "other", int, 1, flag(1, names=("--num-experts",)).metadata["flag"])
    with pytest.raises(AssertionError, match="means both"):
        Registry.of_flags([*entries, clash])


def test_every_flag_has_a_text_and_a_type_that_can_be_described():
    for group, group_class in GROUPS.items():
        texts = docstrings(group_class)
        for entry in flags_of(group, group_class):
            assert texts.get(entry.name, "").endswith("."), f"{entry.option} has no text"
            assert type_name(entry.type)


def test_every_default_is_a_value_of_its_flag():
    for entry in REGISTRY.flags.values():
        if entry.default == () and entry.group == "start":
            continue  # lists of files and variables, which need a value
        if entry.default is not REQUIRED and entry.default is not None and not entry.is_switch:
            words = [str(word) for word in (entry.default if isinstance(entry.default, tuple) else (entry.default,))]
            given, _ = split([entry.option, *words])
            settings = merge_settings(REGISTRY, [given])
            assert not settings.problems, settings.problems
            assert settings.setting(entry.name).value == entry.default


def test_flags_that_differ_or_are_unsupported_have_a_note():
    silent = [
        entry.option
        for entry in REGISTRY.flags.values()
        if entry.declaration.status not in ("same", "new") and not entry.declaration.note
    ]
    assert silent == []


def test_an_unsupported_value_is_rejected_unless_it_is_harmless_and_may_be_ignored():
    assert texts_of("--cpu-offloading") == ["--cpu-offloading is not available yet (command line)"]
    plan = plan_of("--cpu-offloading --allow-ignored-flags")
    assert "ignored: --cpu-offloading is not available" in plan.notes
    assert texts_of("--decrease-batch-size-if-needed --allow-ignored-flags") == [
        "--decrease-batch-size-if-needed is not available yet (command line)"
    ]


def test_an_unsupported_flag_may_keep_its_default():
    plan_of("--tensor-model-parallel-size 1 --expert-tensor-parallel-size 1 --optimizer adam --no-fp16")


def test_flags_without_source_code_have_no_help_text():
    assert docstrings(type("NoSource", (), {"__module__": "nowhere"})) == {}


def test_invalid_utf_8_is_rejected():
    """Files of the run, such as run.yaml, could not store these bytes."""
    (problem,) = problems_of("--wandb-exp-name a\udcff")
    assert problem.what == r"'a\udcff' is not UTF-8 text"
