"""Hugging Face folders: exact round trips, and one complete error message for incompatible folders."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.checkpoint.huggingface.export import Export
from megatron_moe.checkpoint.huggingface.folder import HFFolder, read_config
from megatron_moe.checkpoint.huggingface.load import load_hf, weight_tensors
from megatron_moe.checkpoint.huggingface.weight_map import WeightMapping
from megatron_moe.config.exit_codes import CheckpointProblem, ExitCode
from megatron_moe.config.model import ModelConfig, MTPConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline_layout import place_layers
from megatron_moe.kernels.reference.backend import bundle
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import local_shard, named_parameters
from tests.checkpoint.hf_models import configs, hf_model, saved
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

CONFIGS = configs()
ROUTED = "deepseek_v3, yarn"


def new_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """Builds a model with NaN parameters, so that a parameter that is not loaded is detected."""
    model = GPT(config, ParallelContext.single(dtype=dtype), bundle())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


def written(name: str, folder: Path, max_shard_size: str = "5GB") -> ModelConfig:
    saved(hf_model(CONFIGS[name]), folder, max_shard_size)
    return model_config_from_hf(read_config(folder))


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def hf_tensors(model: nn.Module, config: ModelConfig, hf_config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Exports the tensors of a whole model by Hugging Face name."""
    weights = {name: tensor.detach() for name, tensor in weight_tensors(model).items()}
    export = Export(weights, config, hf_config)

    def read(mapping: WeightMapping) -> Tensor:
        whole = weights[mapping.name]
        return whole if mapping.expert is None else whole[mapping.expert]

    names = [tensor.name for tensor in export.tensors()]
    return dict(zip(names, export.stream(read), strict=True))


def rewrite(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Replaces or adds tensors of a single file; removes those that are None."""
    tensors = {**tensors_in(folder), **change}
    save_file({k: v.contiguous() for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refusal(folder: Path, config: ModelConfig) -> str:
    """Returns the message of the error that loading raises. Asserts that loading did not change the model."""
    model = new_model(config)
    with pytest.raises(CheckpointProblem) as caught:
        load_hf(folder, model, config)
    assert caught.value.code == ExitCode.CHECKPOINT
    assert all(parameter.isnan().all() for parameter in model.parameters()), "the model was changed"
    return str(caught.value)


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_round_trips_exactly(name: str, max_shard_size: str, tmp_path: Path):
    config = written(name, tmp_path, max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "20KB")
    model = new_model(config)
    assert load_hf(tmp_path, model, config) == []
    EXACT.check_all(hf_tensors(model, config, read_config(tmp_path)), tensors_in(tmp_path), "tensors")


def test_names_that_transformers_saves_are_read_like_published_ones(tmp_path: Path):
    config = written("deepseek_v4", tmp_path / "published")
    hf_model(CONFIGS["deepseek_v4"]).save_pretrained(tmp_path / "saved")
    assert "model.layers.0.attn.norm.weight" in tensors_in(tmp_path / "saved")
    saved_by_it, published = new_model(config), new_model(config)
    load_hf(tmp_path / "saved", saved_by_it, config)
    load_hf(tmp_path / "published", published, config)
    EXACT.check_all(saved_by_it.state_dict(), published.state_dict(), "state")


def test_every_problem_is_listed_at_once(tmp_path: Path):
    config = written(ROUTED, tmp_path)
    rewrite(
        tmp_path,
        {
            "model.norm.weight": None,
            "model.layers.1.mlp.experts.3.up_proj.weight": None,
            "model.layers.0.self_attn.gate.weight": torch.zeros(1),
            "model.layers.2.self_attn.o_proj.weight": torch.zeros(32, 7),
            "model.layers.1.mlp.gate.weight": torch.zeros(8, 32, dtype=torch.int8),
        },
    )
    message = refusal(tmp_path, config)
    assert str(tmp_path) in message and "in 5 places" in message
    assert "missing: model.norm.weight" in message
    assert "missing: model.layers.1.mlp.experts.3.up_proj.weight" in message
    assert "left over: model.layers.0.self_attn.gate.weight" in message
    assert "another shape: decoder.layers.2.self_attention.linear_proj.weight [32, 40]" in message
    assert "not a plain floating-point tensor: model.layers.1.mlp.gate.weight is I8" in message


def test_twenty_problems_are_listed_and_the_rest_counted(tmp_path: Path):
    config = written(ROUTED, tmp_path)
    names = [name for name in tensors_in(tmp_path) if ".mlp.experts." in name]
    rewrite(tmp_path, {name: torch.zeros(3, 3) for name in names})
    lines = refusal(tmp_path, config).splitlines()
    # gate and up of an expert are one parameter, down is another
    assert lines[-1].strip() == f"and {len(names) * 2 // 3 - 20} more" and len(lines) == 1 + 20 + 1


@pytest.mark.parametrize(
    "field, sentence",
    [
        ("shared", "left over: model.layers.1.mlp.shared_experts.down_proj.weight"),
        ("experts", "missing: model.layers.1.mlp.experts.8.down_proj.weight"),
        ("expert_bias", "left over: model.layers.1.mlp.gate.e_score_correction_bias"),
        ("layers", "missing: model.layers.3.input_layernorm.weight"),
        ("tied", "left over: lm_head.weight"),
        ("heads", "another shape: decoder.layers.0.self_attention.linear_q_up_proj.weight"),
    ],
)
def test_a_model_of_another_architecture_is_rejected(field: str, sentence: str, tmp_path: Path):
    config = written(ROUTED, tmp_path)
    layer = config.layers[-1]
    moe = layer.feed_forward
    if field == "shared":
        layer = replace(layer, feed_forward=replace(moe, shared=None))
    elif field == "experts":
        more = replace(moe.experts, num_experts=12)
        layer = replace(layer, feed_forward=replace(moe, router=replace(moe.router, num_experts=12), experts=more))
    elif field == "expert_bias":
        layer = replace(layer, feed_forward=replace(moe, router=replace(moe.router, expert_bias=False)))
    first = config.layers[0]
    if field == "heads":
        first = replace(first, mixer=replace(first.mixer, num_heads=8))
    layers = (first, *((layer,) * (3 if field == "layers" else 2)))
    assert sentence in refusal(tmp_path, replace(config, layers=layers, tied_embeddings=field == "tied"))


def test_a_vocabulary_larger_than_the_model_is_rejected(tmp_path: Path):
    config = written("mixtral", tmp_path)
    assert "vocabulary: 13 tokens more than the model's 48 rows" in refusal(tmp_path, replace(config, vocab_size=48))


def test_a_folder_without_safetensors_is_rejected(tmp_path: Path):
    config = written("mixtral", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "pickled .bin" in refusal(tmp_path, config)
    (tmp_path / "pytorch_model.bin").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(tmp_path, config)


def test_quantised_weights_are_rejected(tmp_path: Path):
    config = written("gpt_oss, yarn", tmp_path)
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert "quantised by mxfp4" in refusal(tmp_path, config)


@pytest.mark.parametrize("content, said", [(None, "does not exist"), ("{", "cannot be read"), ("[]", "holds a list")])
def test_a_missing_or_invalid_config_is_named(content: str | None, said: str, tmp_path: Path):
    config = written("mixtral", tmp_path)
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    message = refusal(tmp_path, config)
    assert str(tmp_path / "config.json") in message and said in message


def test_a_truncated_file_is_named(tmp_path: Path):
    config = written("mixtral", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(tmp_path, config)
    assert str(path) in message and "download it again" in message


@pytest.mark.parametrize("named", ["model-00009-of-00009.safetensors", "../model.safetensors", "/etc/passwd"])
def test_an_index_that_lists_a_file_outside_the_folder_is_rejected(named: str, tmp_path: Path):
    config = written("mixtral", tmp_path / "folder", "20KB")
    saved(hf_model(CONFIGS["mixtral"]), tmp_path)
    path = tmp_path / "folder" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = named
    path.write_text(json.dumps(index))
    assert f"lists {named}, not found in the folder" in refusal(tmp_path / "folder", config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bf16_weights_are_unchanged_in_wider_parameters(dtype: torch.dtype, tmp_path: Path):
    config = written(ROUTED, tmp_path)
    rounded = {name: tensor.bfloat16() for name, tensor in tensors_in(tmp_path).items()}
    rewrite(tmp_path, rounded)
    model = new_model(config, dtype)
    load_hf(tmp_path, model, config)
    read = hf_tensors(model, config, read_config(tmp_path))
    EXACT.check_all({k: v.double() for k, v in read.items()}, {k: v.double() for k, v in rounded.items()}, "tensors")


def test_copies_and_derived_tensors_are_ignored_with_a_note(tmp_path: Path):
    config = written("qwen3_moe tied, linear rope", tmp_path)
    embedding = tensors_in(tmp_path)["model.embed_tokens.weight"]
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, {"lm_head.weight": embedding.clone(), inv_freq: torch.ones(4)})
    assert load_hf(tmp_path, new_model(config), config) == [f"2 tensors not used: lm_head.weight, {inv_freq}"]


def test_a_model_without_mtp_ignores_a_published_mtp_layer(tmp_path: Path):
    config = written("glm4_moe", tmp_path)
    rewrite(
        tmp_path, {"model.layers.3.enorm.weight": torch.ones(32), "model.layers.3.eh_proj.weight": torch.ones(32, 64)}
    )
    (note,) = load_hf(tmp_path, new_model(config), config)
    assert note == "2 tensors not used: model.layers.3.eh_proj.weight, model.layers.3.enorm.weight"


def test_a_model_with_mtp_rejects_a_folder_without(tmp_path: Path):
    config = written("glm4_moe", tmp_path)
    message = refusal(tmp_path, replace(config, mtp=MTPConfig(num_layers=1)))
    assert "does not fit this model in 1 places" in message
    assert "it has no MTP layers: give --mtp-num-layers 0" in message
    rewrite(tmp_path, {"model.layers.3.enorm.weight": torch.ones(32)})
    message = refusal(tmp_path, replace(config, mtp=MTPConfig(num_layers=1)))
    assert "missing: model.layers.3.hnorm.weight" in message and "--mtp-num-layers" not in message


def test_differences_from_the_published_config_are_noted(tmp_path: Path):
    """The public Mixtral recipes use the default --rotary-base 10000."""
    config = written("mixtral", tmp_path)
    mixer = config.layers[1].mixer
    wrong = replace(config.layers[1], mixer=replace(mixer, rope=replace(mixer.rope, base=10000.0)))
    config = replace(config, layers=(config.layers[0], wrong), vocab_size=64)
    assert load_hf(tmp_path, new_model(config), config) == [
        "differs from the published model: layer 1 mixer rope base: 10000.0, published 1000000.0",
        "3 padding rows of the vocabulary start at zero",
    ]


def test_a_model_that_the_family_cannot_represent_is_not_exported(tmp_path: Path):
    config = written("mixtral", tmp_path)
    hf_config = read_config(tmp_path)
    learned = replace(config, position_embedding="learned_absolute", max_positions=8)
    with pytest.raises(CheckpointProblem, match="no tensor for embedding.position_embeddings.weight"):
        hf_tensors(new_model(learned), learned, hf_config)


LAYOUTS = {
    "tp2": ParallelConfig(world_size=2, tp=2, etp=2, sequence_parallel=True),
    "tp4": ParallelConfig(world_size=4, tp=4, ep=4, sequence_parallel=True),
    "ep4": ParallelConfig(world_size=4, ep=4),
    "tp2-ep2": ParallelConfig(world_size=4, tp=2, ep=2, sequence_parallel=True),
    "pp2": ParallelConfig(world_size=2, pp=2),
}


def over_ranks(config: ModelConfig) -> ModelConfig:
    """Adds a dispatcher and a vocabulary size that the ranks divide."""
    layers = [
        replace(layer, feed_forward=replace(layer.feed_forward, dispatcher="alltoall")) if layer.is_moe else layer
        for layer in config.layers
    ]
    return replace(config, vocab_size=64, layers=tuple(layers))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v2 with q latent", ROUTED, "gpt_oss, yarn", "glm4_moe"])
def test_every_layout_loads_its_shard(name: str, layout: ParallelConfig, tmp_path: Path):
    config = over_ranks(written(name, tmp_path))
    whole = new_model(config)
    load_hf(tmp_path, whole, config)
    expected = {name: parameter.detach() for name, parameter in named_parameters(whole)}

    def read(context: ParallelContext) -> set[str]:
        pp = context.group("pp")
        counts = [len(config.layers)] if pp.size == 1 else [1, len(config.layers) - 1]
        model = GPT(config, context, bundle(), chunks=place_layers(counts, pp.size, 0, 0).chunks(pp.rank))
        load_hf(tmp_path, model, config, pp)
        for name, p in named_parameters(model):
            EXACT.check(p, local_shard(expected[name], p.boxes, p.meta), name)
        return {name for name, _ in named_parameters(model)}

    held = on_threads(layout, read, dtype=torch.float32)
    assert set().union(*held) == expected.keys()


MEGABYTE = 1 << 20


def resident(path: Path) -> int:
    """Bytes of a memory-mapped file that are resident in this process."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_pages_of_a_file_are_released_with_its_tensors(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    save_file({f"t{n}": torch.full((MEGABYTE // 4,), float(n)) for n in range(16)}, path)
    with ExitStack() as stack:
        source = HFFolder(tmp_path, {}, stack)
        assert [source.tensor(f"t{n}").sum().item() for n in range(16)] == [n * MEGABYTE / 4 for n in range(16)]
        assert resident(path) < 4 * MEGABYTE
        kept = source.tensor("t3")
        assert kept.sum().item() == 3 * MEGABYTE / 4 and resident(path) >= MEGABYTE // 2


def test_a_tensor_in_two_files_is_rejected(tmp_path: Path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"twice": torch.zeros(1), name: torch.zeros(1)}, tmp_path / name)
    index = {"weight_map": {"twice": "a.safetensors", "b.safetensors": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with ExitStack() as stack, pytest.raises(CheckpointProblem, match=r"b.safetensors holds tensors.*\n  twice"):
        HFFolder(tmp_path, {}, stack)


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a.safetensors"]}, {"weight_map": {"a": 3, "b": "x"}}])
def test_an_index_without_file_names_is_rejected(index: dict, tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with ExitStack() as stack, pytest.raises(CheckpointProblem, match=r"index.json has no weight_map"):
        HFFolder(tmp_path, {}, stack)
