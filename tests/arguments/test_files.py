"""YAML files of flags: the three accepted structures, environment variables, origins of values, and invalid files."""

import re
from pathlib import Path

import pytest

from arguments import files, recipes
from arguments.errors import Finished, FlagErrors
from arguments.flags import Registry
from arguments.parser import merge_settings
from arguments.read import read_plan
from tests.helpers.command_lines import plan_of, problems_of, texts_of

REGISTRY = Registry.declared()

OURS = """
# a comment
model:
  num-layers: 3
  norm_epsilon: 1e-6
  moe-layer-freq: 2        # belongs to another group; the name is enough
swiglu: yes
disable-bias-linear: true
data-path: [0.3, a, 0.7, b]
valid_data_path: c 'd e'
split: 99,1,0
load: null
wandb-project: "12:30"
"""
ZOO = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  MEGATRON_WIDTH: 64
MODEL_ARGS:
  --num-layers: ${LAYERS}
  --kv-channels: $MEGATRON_WIDTH
  --swiglu: true
  --sequence-parallel: false
  --load: false
  --save: ${OUTPUT}/checkpoints
  --tensorboard-dir: ${EMPTY}
  --moe-layer-freq: ([0]*3+[1]*58)
  --recompute-modules: moe_act layernorm
  --wandb-exp-name: ${NAME:-run-1}
  --norm-epsilon: 1e-6
unrelated: 3
"""
DEV = """
DEPENDENCIES: |
  FROM image
ENV_VARS: {USE_MNNVL: 1}
ARGS:
  num_layers: 3
  use_mcore_models: true
  no_load_optim: true
  bias_swiglu_fusion: false
  cuda_graph_scope: ['attn', 'moe_router']
  recompute_modules: [moe_act layernorm]
  exit_duration_in_mins: false
  adam_eps: 1e-8
"""


def read(path: Path, text: str, **environ: str) -> files.FlagFile:
    path.write_text(text, encoding="utf-8")
    return files.read_file(path, REGISTRY, environ)


def values(file: files.FlagFile) -> dict[str, object]:
    settings = merge_settings(REGISTRY, [file.flags])
    assert file.problems + settings.problems == []
    return {name: setting.value for name, setting in settings.values.items()}


def test_a_flat_file_is_read(tmp_path):
    assert values(read(tmp_path / "a.yaml", OURS)) == {
        "num_layers": 3,
        "norm_epsilon": 1e-6,
        "moe_layer_freq": 2,
        "swiglu": True,
        "add_bias_linear": False,
        "data_path": ("0.3", "a", "0.7", "b"),
        "valid_data_path": ("c", "d e"),
        "split": "99,1,0",
        "load": None,
        "wandb_project": "12:30",
    }


def test_a_file_of_the_model_zoo_is_read(tmp_path):
    file = read(tmp_path / "a.yaml", ZOO, LAYERS="61", OUTPUT="out", EMPTY="")
    assert values(file) == {
        "num_layers": 61,
        "kv_channels": 64,
        "swiglu": True,
        "sequence_parallel": False,
        "save": "out/checkpoints",
        "moe_layer_freq": (0,) * 3 + (1,) * 58,
        "recompute_modules": ("moe_act", "layernorm"),
        "wandb_exp_name": "run-1",
        "norm_epsilon": 1e-6,
    }
    assert file.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "MEGATRON_WIDTH": "64"}


def test_a_file_of_megatron_dev_is_read(tmp_path):
    file = read(tmp_path / "a.yaml", DEV)
    assert values(file) == {
        "num_layers": 3,
        "load_optim": False,
        "cuda_graph_modules": ("attn", "moe_router"),
        "recompute_modules": ("moe_act", "layernorm"),
        "adam_eps": 1e-8,
    }
    assert file.environment == {"USE_MNNVL": "1"}


MERGED = """
COMMON: &common
  --lr: 0.1
  --adam-eps: 0.1
  --adam-beta1: &beta 0.5
MORE: &more {--adam-eps: 0.2, --adam_beta2: *beta, "--min-lr": 0.01}
ENV_VARS: &variables {NCCL_A: 1}
MODEL_ARGS:
  <<: [*common, *more]
  --lr: 0.3
  --recompute-modules: "[layernorm moe_act]"
  --moe-layer-freq: [0, 1, 1]
  --cuda-graph-modules: "['attn', 'moe_router']"
"""


def test_anchors_merge_keys_and_lists_in_quotes(tmp_path):
    """A mapping's own keys override merged ones, and earlier merged mappings override later ones, as in YAML."""
    file = read(tmp_path / "a.yaml", MERGED)
    assert values(file) == {
        "lr": 0.3,
        "adam_eps": 0.1,
        "adam_beta1": 0.5,
        "adam_beta2": 0.5,
        "min_lr": 0.01,
        "recompute_modules": ("layernorm", "moe_act"),
        "moe_layer_freq": (0, 1, 1),
        "cuda_graph_modules": ("attn", "moe_router"),
    }
    assert merge_settings(REGISTRY, [file.flags]).notes == []
    assert values(read(tmp_path / "b.yaml", "&a\n<<: *a\nlr: 1")) == {"lr": 1.0}


def test_nested_merges_are_expanded_once(tmp_path):
    levels = "".join(f"L{n}: &l{n} {{<<: [*l{n - 1}, *l{n - 1}]}}\n" for n in range(1, 60))
    file = read(tmp_path / "a.yaml", f"L0: &l0 {{lr: 1}}\n{levels}ARGS: {{<<: *l59}}\n")
    assert values(file) == {"lr": 1.0}


@pytest.mark.parametrize(("variables", "name"), [({}, "run-1"), ({"NAME": ""}, "run-1"), ({"NAME": "mine"}, "mine")])
def test_a_default_replaces_an_unset_or_empty_variable(tmp_path, variables, name):
    """As in shells."""
    file = read(tmp_path / "a.yaml", "wandb-exp-name: ${NAME:-run-1}\nload: ${NAME:-}\n", **variables)
    assert values(file) == {"wandb_exp_name": name} | ({"load": name} if name == "mine" else {})


def test_an_unset_variable_is_one_problem_with_all_its_lines(tmp_path):
    text = "save: ${OUT}/a\nload: ${OUT}/b\ntensorboard-dir: ${OUT}/${NAME}\nrun-dir: ${OTHER:-x}\n"
    file = read(tmp_path / "a.yaml", text)
    assert [problem.what.partition("a.yaml:")[2] for problem in file.problems] == [
        "1, 2, 3 needs the environment variable OUT, which is not set",
        "3 needs the environment variable NAME, which is not set",
    ]


def test_every_value_has_the_line_of_its_file(tmp_path):
    path = tmp_path / "a.yaml"
    origins = {given.option: given.origin for given in read(path, OURS).flags}
    assert origins["--num-layers"] == f"{path}:4"
    assert origins["--split"] == f"{path}:11"


def test_missing_variables_are_reported_once_each(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(ZOO, encoding="utf-8")
    texts = texts_of(f"--config {path}", without="--num-layers --moe-layer-freq")
    assert [text for text in texts if "environment variable" in text] == [
        f"{path}:6 needs the environment variable LAYERS, which is not set",
        f"{path}:11 needs the environment variable OUTPUT, which is not set",
        f"{path}:12 needs the environment variable EMPTY, which is not set",
    ]
    assert not any("--num-layers" in text for text in texts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: $(rm -rf x)", "a.yaml:1 contains shell code"),
        ("lr: $((1+1))", "which is not executed"),
        ("lr: ${1+x}", "contains shell code"),
        ("lr: !!python/object/apply:os.system ['true']", "a.yaml:1 has the tag !!python/object/apply:os.system;"),
        ("lr: !!python/name:os.system ''", "a.yaml:1 has the tag !!python/name:os.system;"),
        ("lr: !!python/object:str 5", "a.yaml:1 has the tag !!python/object:str;"),
        ("recompute_modules: [!!python/name:a b]", "a.yaml:1 has the tag !!python/name:a;"),
        ("model: !!python/object/new:a {lr: 1}", "a.yaml:1 has the tag !!python/object/new:a;"),
        ("!!python/object/new:a\nlr: 1", "a.yaml:1 has the tag !!python/object/new:a;"),
        ("model: {lr: {a: 1}}", "must be a text, a number or a list"),
        ("recompute_modules: [[a]]", "must be a text, a number or a list"),
        ("- lr", "must contain `name: value` entries"),
        ("just text", "must contain `name: value` entries"),
        ("? [a]\n: 3", "a key that is not a name"),
        ("config: b.yaml", "--config belongs on the command line"),
        ("&a {model: *a}", "must be a text, a number or a list"),
        ("<<: 3", "must contain `name: value` entries"),
        ("moe_layer_freq: {<<: 3}", "must be a text, a number or a list"),
    ],
)
def test_errors_in_a_file_are_reported_with_their_lines(tmp_path, text, message):
    file = read(tmp_path / "a.yaml", text)
    assert len([problem for problem in file.problems if message in problem.what]) == 1, file.problems


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b: c", "/a.yaml:1 is not YAML: mapping values are not allowed in this context"),
        ("a: 1\n---\na: 2", "/a.yaml:2 is not YAML: expected a single document in the stream, but found another"),
        ("a: *b", "/a.yaml:1 is not YAML: found undefined alias"),
        ("\x00", "/a.yaml is not YAML: control characters are not allowed"),
        ("a:\n  'b", " is not YAML: found unexpected end of stream while scanning a quoted scalar"),
    ],
)
def test_invalid_yaml_is_the_only_reported_problem(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FlagErrors) as caught:
        read_plan(["--config", str(path)], {})
    assert [message in problem.what for problem in caught.value.problems] == [True]


def test_a_missing_file_is_the_only_reported_problem(tmp_path):
    with pytest.raises(FlagErrors, match="none.yaml cannot be read: No such file"):
        read_plan(["--config", str(tmp_path / "none.yaml")], {})


def test_an_empty_file_sets_no_flags(tmp_path):
    assert values(read(tmp_path / "a.yaml", "")) == {}


def test_null_unsets_a_value_of_an_earlier_file(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("load: x\nmoe-ffn-hidden-size: 64\n", encoding="utf-8")
    second.write_text("load: null\n", encoding="utf-8")
    plan = plan_of(f"--config {first} {second}", without="--moe-ffn-hidden-size")
    assert plan.checkpoint.load is None
    assert plan.model.layers[1].feed_forward.experts.ffn_hidden_size == 64


def test_null_for_a_required_value_is_rejected(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("adam-eps: null\n", encoding="utf-8")
    assert texts_of(f"--config {path}")[0].startswith(
        "--adam-eps cannot be null; leave it out to use the default 1e-08"
    )


def test_the_command_line_overrides_files_and_later_files_earlier_ones(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("adam-beta1: 0.1\nadam-beta2: 0.1\nadam-eps: 0.1\n", encoding="utf-8")
    second.write_text("adam-beta2: 0.2\nadam-eps: 0.2\n", encoding="utf-8")
    optimizer = plan_of(f"--adam-eps 0.3 --config {first} {second}").optimizer
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.1, 0.2, 0.3)


def test_duplicate_key_in_a_file_is_noted(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("adam-eps: 0.1\nadam-eps: 0.2\n", encoding="utf-8")
    plan = plan_of(f"--config {path}")
    assert f"--adam-eps is given twice: 0.1 ({path}:1), then 0.2 ({path}:2); the last value is used" in plan.notes


def test_variables_of_a_file_are_set_unless_the_user_set_them(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("environment: {NCCL_A: 1, NCCL_B: 2}\nadam-eps: 0.1\n", encoding="utf-8")
    assert plan_of(f"--config {path}", environ={"NCCL_B": "3"}).environment == (("NCCL_A", "1"),)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('"A; touch x; B": v', "a.yaml:1 names the environment variable 'A; touch x; B'"),
        ("A=B: 1", "names the environment variable 'A=B'"),
        ('"": 1', "names the environment variable ''"),
        ("1A: 1", "names the environment variable '1A'"),
        ('"A\\n": 1', "names the environment variable 'A\\n'"),
        ("Ä: 1", "names the environment variable 'Ä'"),
        ('BASH_ENV: "$$(touch x)"', "sets the environment variable BASH_ENV, which may change what code runs"),
        ("SHELLOPTS: xtrace", "sets SHELLOPTS, which belongs to the shell or the interpreter"),
        ('NCCL_A: "b\\0"', "contains a NUL character, 'b\\x00'"),
        (
            'NCCL_A: "b\\ntouch x"',
            "sets the environment variable NCCL_A to 'b\\ntouch x', which contains the character",
        ),
        ('NCCL_A: "b\\x1b[2J"', "which contains the character U+001B"),
    ],
)
@pytest.mark.parametrize("more", ["", " --dry-run"])
def test_invalid_environment_variables_are_rejected(tmp_path, entry, message, more):
    path = tmp_path / "a.yaml"
    path.write_text(f"environment: {{{entry}}}\n", encoding="utf-8")
    (text,) = texts_of(f"--config {path}{more}")
    assert message in text


@pytest.mark.parametrize(
    "variable",
    "LD_PRELOAD LD_AUDIT PYTHONPATH PYTHONSTARTUP PATH NCCL_NET_PLUGIN TRITON_PTXAS_PATH CUDA_INJECTION64_PATH".split(),
)
def test_variables_that_run_code_must_be_allowed_on_the_command_line(tmp_path, variable):
    path = tmp_path / "a.yaml"
    path.write_text(f"environment: {{{variable}: /x}}\n", encoding="utf-8")
    (text,) = texts_of(f"--config {path}")
    assert f"sets the environment variable {variable}, which may change what code runs" in text
    assert plan_of(f"--config {path} --allow-environment A {variable}").environment == ((variable, "/x"),)
    path.write_text(f"environment: {{{variable}: /x}}\nallow-environment: {variable}\n", encoding="utf-8")
    assert "--allow-environment belongs on the command line" in texts_of(f"--config {path}")[-1]


def test_variables_of_published_recipes_and_only_plain_warning_filters_are_allowed(tmp_path):
    """Warning filters with a category are rejected because Python would import the module of the category."""
    path = tmp_path / "a.yaml"
    for value, refused in (("ignore", 0), ("all:0:antigravity.x", 1)):
        text = f"ENV_VARS: {{PYTHONWARNINGS: {value}, HF_HOME: /x, USE_MNNVL: 1, NVTE_FUSED_ATTN: 1}}\n"
        assert len(read(path, text).problems) == refused


def test_a_flag_with_a_nul_character_is_rejected(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text('run-dir: "runs/a\\0b"\n', encoding="utf-8")
    assert texts_of(f"--config {path}", without="--run-dir") == [f"{path}:1 contains a NUL character, 'runs/a\\x00b'"]


def test_a_recipe_is_found_by_name_and_comes_before_files(tmp_path, monkeypatch):
    folder, path = tmp_path / "recipes", tmp_path / "a.yaml"
    folder.mkdir()
    (folder / "tiny.yaml").write_text("adam-beta1: 0.1\nadam-beta2: 0.1\n", encoding="utf-8")
    path.write_text("adam-beta2: 0.2\n", encoding="utf-8")
    monkeypatch.setattr(recipes, "recipe_folders", lambda: (tmp_path / "nowhere", folder))
    optimizer = plan_of(f"--config {path} --recipe tiny").optimizer
    assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.1, 0.2)
    assert "there is no recipe 'tinny'" in texts_of("--recipe tinny")[0]


def test_base_files_are_relative_to_the_file(tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "a.yaml").write_text("environment: {NCCL_A: 1}\nadam-beta1: 0.1\nadam-beta2: 0.1\nadam-eps: 0.1\n")
    (parts / "b.yaml").write_text("base: a.yaml\nabout: {model: M}\nadam-beta2: 0.2\nadam-eps: 0.2\n")
    path = tmp_path / "c.yaml"
    path.write_text("base: [parts/b.yaml]\nadam-eps: 0.3\n")
    plan = plan_of(f"--config {path}")
    assert (plan.optimizer.adam_beta1, plan.optimizer.adam_beta2, plan.optimizer.adam_eps) == (0.1, 0.2, 0.3)
    assert plan.environment == (("NCCL_A", "1"),)
    assert not [note for note in plan.notes if "twice" in note]


def test_cyclic_and_missing_base_files_are_rejected(tmp_path):
    first, second, third = (tmp_path / f"{name}.yaml" for name in "abc")
    first.write_text("base: b.yaml\n")
    second.write_text("base: a.yaml\n")
    third.write_text("base: nowhere.yaml\n")
    assert any("a.yaml includes itself" in text for text in texts_of(f"--config {first}"))
    (missing,) = problems_of(f"--config {third}")
    assert "nowhere.yaml cannot be read" in missing.what
    assert missing.remedy == f"correct `base` of {third}, whose paths start at the folder of that file"


def test_a_recipe_has_a_description(tmp_path, monkeypatch):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "model.yaml").write_text("about: {model: M, source: S}\n")
    (tmp_path / "fast.yaml").write_text("base: parts/model.yaml\nabout: {gpu: h100, gpus: 8, source: T}\n")
    monkeypatch.setattr(recipes, "recipe_folders", lambda: (tmp_path,))
    assert recipes.recipe_names() == ["fast"]
    assert recipes.about_of_recipe("fast", REGISTRY) == recipes.About(model="M", gpu="h100", gpus=8, source="T")


def test_print_config_shows_every_value_with_its_origin():
    with pytest.raises(Finished) as caught:
        read_plan(["--recipe", "quickstart", "--print-config", "--lr", "1"], {})
    lines = [" ".join(line.split()) for line in caught.value.text.splitlines()]
    assert "lr: 1.0 # command line" in lines
    assert "adam-beta1: 0.9 # default" in lines
    assert any(line.startswith("num-layers: 3 # ") and re.search(r"quickstart\.yaml:\d+$", line) for line in lines)


def test_print_config_without_flags_lists_the_required_flags():
    with pytest.raises(Finished) as caught:
        read_plan(["--print-config"], {})
    assert "# num-layers: required" in caught.value.text
