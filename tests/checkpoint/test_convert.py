"""Conversion between Hugging Face folders and checkpoints: bitwise round trips and bounded memory."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_moe.checkpoint.huggingface import convert
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.checkpoint.huggingface.convert import ConversionReport, from_hf, to_hf
from megatron_moe.checkpoint.huggingface.export import Export, split_into_files, write_folder
from megatron_moe.checkpoint.huggingface.folder import HFFolder, read_config
from megatron_moe.checkpoint.huggingface.load import load_hf, weight_tensors
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import TensorShard, tensor_key
from megatron_moe.config.exit_codes import CheckpointProblem, EnvironmentProblem
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.kernels.reference.backend import bundle
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.checkpointing import model_tensors
from tests.checkpoint.hf_models import configs, hf_model, saved, tokens
from tests.checkpoint.test_hf_fp8 import published as published_in_fp8
from tests.checkpoint.test_huggingface import over_ranks, tensors_in
from tests.checkpoint.test_huggingface_mtp import published as published_with_mtp
from tests.helpers.checkpoint_files import FaultyStorage, disk_full, flip_bit, verify
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP32_PARITY

CONFIGS = configs()
ROUTED = "deepseek_v3, yarn"
STATE = {"state": {}}


def skeleton(config: ModelConfig) -> GPT:
    return GPT(config, ParallelContext.single(dtype=torch.bfloat16, device="meta"), bundle())


def import_folder(folder: Path, save: Path, config: ModelConfig | None = None) -> tuple[ConversionReport, ModelConfig]:
    """Converts the folder to a checkpoint."""
    config = config or model_config_from_hf(read_config(folder))
    return from_hf(folder, save, skeleton(config), config, STATE, {}, say=lambda line: None), config


def export_checkpoint(
    checkpoint: Path, output: Path, config: ModelConfig, template: Path, **options
) -> dict[str, Tensor]:
    """Converts the checkpoint to a folder and returns its tensors."""
    to_hf(checkpoint, output, skeleton(config), config, template, **options)
    return tensors_in(output)


def source(name: str, folder: Path) -> Path:
    """Saves a folder with matrices in bf16, vectors in fp32 and integer ids."""
    saved(hf_model(CONFIGS[name]), folder)
    found = load_file(folder / "model.safetensors")
    mixed = {k: v.bfloat16() if v.dim() > 1 and v.is_floating_point() else v for k, v in found.items()}
    save_file(mixed, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def routed(tmp_path_factory) -> tuple[Path, Path, ModelConfig]:
    """Returns a folder, the checkpoint converted from it, and its config."""
    folder = source(ROUTED, tmp_path_factory.mktemp("routed") / "hf")
    report, config = import_folder(folder, folder.parent / "ours")
    return folder, report.target, config


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    EXACT.check_all(found, expected, "tensors")
    assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in expected.items()}


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_round_trips_exactly(name: str, shard_bytes: int, tmp_path: Path):
    folder = source(name, tmp_path / "hf")
    report, config = import_folder(folder, tmp_path / "ours")
    assert verify(report.target) == [] and report.notes == []
    found = export_checkpoint(report.target, tmp_path / "back", config, folder, shard_bytes=shard_bytes)
    equal(found, tensors_in(folder))
    assert sorted(row.hf_name for row in report.rows) == sorted(found)
    hf_config = read_config(folder) | {"dtype": "bfloat16"}
    if "num_nextn_predict_layers" in hf_config:  # transformers writes 1, although it saves no such layer
        hf_config["num_nextn_predict_layers"] = 0
    assert read_config(tmp_path / "back") == hf_config


def test_shards_respect_the_size_limit_and_the_index_lists_every_tensor(routed, tmp_path: Path):
    folder, checkpoint, config = routed
    export_checkpoint(checkpoint, tmp_path / "back", config, folder, shard_bytes=9_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "back").glob("*.safetensors")}
    assert {name: path for path, held in files.items() for name in held} == index["weight_map"]
    sizes = {path: sum(t.numel() * t.element_size() for t in held.values()) for path, held in files.items()}
    assert sum(sizes.values()) == index["metadata"]["total_size"] and max(sizes.values()) <= 9_000
    assert sorted(files) == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]


def test_a_tensor_larger_than_a_shard_gets_its_own_file(routed):
    folder, _, config = routed
    tensors = Export(weight_tensors(skeleton(config)), config, read_config(folder)).tensors()
    assert all(len(held) == 1 for held in split_into_files(tensors, 1))


def test_mtp_layers_round_trip_with_copies_of_shared_weights(tmp_path: Path):
    published_with_mtp(CONFIGS[ROUTED], tmp_path / "hf")
    config = with_mtp(tmp_path / "hf")
    report, _ = import_folder(tmp_path / "hf", tmp_path / "ours", config)
    equal(export_checkpoint(report.target, tmp_path / "back", config, tmp_path / "hf"), tensors_in(tmp_path / "hf"))
    assert read_config(tmp_path / "back")["num_nextn_predict_layers"] == 1


def with_mtp(folder: Path) -> ModelConfig:
    hf_config = {**read_config(folder), "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(hf_config))
    return model_config_from_hf(hf_config, mtp=True)


@pytest.mark.parametrize("copy", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_copy_that_differs_from_its_original_is_rejected(copy: str, tmp_path: Path):
    published_with_mtp(CONFIGS[ROUTED], tmp_path)
    held = tensors_in(tmp_path)
    held[f"model.layers.3.{copy}"][0, 0] += 1
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointProblem, match=f"model.layers.3.{copy} is not equal to"):
        import_folder(tmp_path, tmp_path / "ours", with_mtp(tmp_path))


def test_layers_missing_in_the_model_are_rejected(tmp_path: Path):
    """Training may ignore the extra layers, but a conversion would lose them."""
    published_with_mtp(CONFIGS[ROUTED], tmp_path)
    with pytest.raises(CheckpointProblem, match="left over: model.layers.3.enorm.weight"):
        import_folder(tmp_path, tmp_path / "ours")


def test_layers_that_transformers_ignores_are_noted(tmp_path: Path):
    """Published folders of ERNIE 4.5 have multi-token prediction under names of their own."""
    names = ("mtp_block.0.self_attn.q_proj", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0")
    held = tensors_in(source("ernie4_5_moe", tmp_path))
    extra = {f"model.{name}.weight": torch.ones(32, 32) for name in names}
    save_file(held | extra, tmp_path / "model.safetensors")
    report, config = import_folder(tmp_path, tmp_path / "ours")
    assert [note for note in report.notes if note.startswith("4 tensors not used: model.mtp_block.0.self_attn")]
    load_hf(tmp_path, GPT(config, ParallelContext.single(), bundle()), config)


@pytest.mark.parametrize("joined", [True, False])
def test_the_language_model_of_a_model_of_images_is_converted(joined: bool, tmp_path: Path):
    """Qwen3.5 is published with the experts of a layer in two tensors, in FP8 with tensors for each."""
    sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_position_embeddings": 16}
    whole = transformers.Qwen3_5MoeConfig(text_config=CONFIGS["qwen3_5_moe"].to_dict(), vision_config=sizes)
    published = hf_model(whole, kind=transformers.AutoModelForImageTextToText)
    published.save_pretrained(tmp_path / "hf")
    held = tensors_in(tmp_path / "hf")
    assert "model.language_model.layers.0.mlp.experts.0.gate_proj.weight" in held
    if joined:
        held = published.state_dict()
        save_file(held, tmp_path / "hf" / "model.safetensors")
        assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in held
    images = sorted(name for name in held if name.startswith("model.visual."))

    report, config = import_folder(tmp_path / "hf", tmp_path / "ours")
    assert report.notes == [f"{len(images)} tensors not used: {', '.join(images[:3])} …"]
    export_checkpoint(report.target, tmp_path / "back", config, tmp_path / "hf")
    text = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    assert [type(text).__name__] == read_config(tmp_path / "back")["architectures"]
    FP32_PARITY.check(text.eval()(tokens()).logits, published(tokens()).logits, "logits")


@pytest.mark.parametrize(
    "shape, said",
    [
        ((24, 32), "left over: {0}.gate_up_proj"),
        ((8, 25, 32), "another shape: .* from {0}.0.gate_proj.weight [12, 32], {0}.0.up_proj.weight [13, 32]"),
    ],
)
def test_experts_in_a_tensor_of_another_shape_are_rejected(shape: tuple[int, ...], said: str, tmp_path: Path):
    held, start = tensors_in(source("qwen3_5_moe", tmp_path)), "model.layers.0.mlp.experts"
    held = {name: value for name, value in held.items() if not (name.startswith(start) and "down" not in name)}
    save_file({**held, f"{start}.gate_up_proj": torch.ones(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointProblem, match=said.format(start).replace("[", r"\[")):
        import_folder(tmp_path, tmp_path / "ours")


def test_fp8_blocks_are_exported_as_bf16(tmp_path: Path):
    config, read = published_in_fp8(tmp_path / "hf")
    report, _ = import_folder(tmp_path / "hf", tmp_path / "ours", config)
    equal(export_checkpoint(report.target, tmp_path / "back", config, tmp_path / "hf"), read)
    hf_config = read_config(tmp_path / "back")
    assert "quantization_config" not in hf_config and hf_config["dtype"] == "bfloat16"


@pytest.mark.parametrize("layout", [{"tp": 2, "etp": 2, "sequence_parallel": True}, {"ep": 2}], ids=["tp", "ep"])
def test_a_checkpoint_of_any_layout_is_exported(layout: dict, routed, tmp_path: Path):
    folder, _, config = routed
    config = over_ranks(config)

    def save(context: ParallelContext) -> None:
        model = GPT(config, context, bundle())
        load_hf(folder, model, config)
        saver = CheckpointSaver(tmp_path / "ours", context, say=lambda line: None)
        assert saver.save(7, model_tensors(model), STATE) is not None
        saver.close()

    on_threads(ParallelConfig(world_size=2, **layout), save, dtype=torch.float32)
    found = export_checkpoint(tmp_path / "ours" / "iter_0000007", tmp_path / "back", config, folder)
    EXACT.check_all(found, {name: value.float() for name, value in tensors_in(folder).items()}, "tensors")


def test_a_given_dtype_does_not_apply_to_router_biases(routed, tmp_path: Path):
    folder, checkpoint, config = routed
    found = export_checkpoint(checkpoint, tmp_path / "back", config, folder, dtype=torch.float64)
    biases = {name for name, value in found.items() if value.dtype == torch.float32}
    assert biases == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2)}
    assert {value.dtype for name, value in found.items() if name not in biases} == {torch.float64}


class Watched:
    """Wraps a function that returns tensors and tracks the peak of their live bytes."""

    def __init__(self, function) -> None:
        self._function, self._alive = function, 0
        self.most = self.largest = self.total = 0

    def __call__(self, *args) -> Tensor:
        tensor = self._function(*args)
        size = tensor.numel() * tensor.element_size()
        self._alive += size
        self.most, self.largest = max(self.most, self._alive), max(self.largest, size)
        self.total += size
        weakref.finalize(tensor, self._freed, size)
        return tensor

    def _freed(self, size: int) -> None:
        self._alive -= size


def test_memory_holds_one_parameter_or_expert_at_a_time(routed, tmp_path: Path, monkeypatch):
    folder, checkpoint, config = routed
    taken = Watched(HFFolder.tensor)
    monkeypatch.setattr(HFFolder, "tensor", lambda self, name: taken(self, name))
    import_folder(folder, tmp_path / "ours")
    given = Watched(convert._read)
    monkeypatch.setattr(convert, "_read", given)
    export_checkpoint(checkpoint, tmp_path / "back", config, folder)
    for watched in (taken, given):
        assert watched.most <= 2 * watched.largest < watched.total / 5


def test_a_damaged_checkpoint_is_rejected_without_output(routed, tmp_path: Path):
    folder, _, config = routed
    report, _ = import_folder(folder, tmp_path / "ours")
    flip_bit(next(report.target.glob("*.safetensors")), -1, 3)
    with pytest.raises(CheckpointProblem, match=r"is damaged and not used.*\n.*crc32"):
        export_checkpoint(report.target, tmp_path / "back", config, folder)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "missing in the checkpoint: model.decoder.final_layernorm.weight"),
        ("more", "unknown to this run: model.odd"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(change: str, said: str, routed, tmp_path: Path):
    folder, _, config = routed
    held = {
        tensor_key("model", n): TensorShard.whole(torch.zeros(t.shape))
        for n, t in skeleton(config).state_dict().items()
    }
    if change == "missing":
        del held[tensor_key("model", "decoder.final_layernorm.weight")]
    else:
        held[tensor_key("model", "odd")] = TensorShard.whole(torch.zeros(1))
    CheckpointSaver(tmp_path, ParallelContext.single(), say=lambda line: None).save(1, held, STATE)
    with pytest.raises(CheckpointProblem, match=said):
        export_checkpoint(tmp_path / "iter_0000001", tmp_path / "back", config, folder)


def test_a_config_of_another_model_is_refused(routed, tmp_path: Path):
    folder, checkpoint, config = routed
    (tmp_path / "config.json").write_text(json.dumps({**read_config(folder), "routed_scaling_factor": 1.5}))
    with pytest.raises(CheckpointProblem, match=r"scaling_factor: 2.5, published 1.5 \(config.json\)"):
        export_checkpoint(checkpoint, tmp_path / "back", config, tmp_path)


def test_a_missing_tensor_is_rejected_before_anything_is_written(routed, tmp_path: Path):
    folder, _, config = routed
    held = tensors_in(folder)
    del held["model.norm.weight"]
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointProblem, match="missing: model.norm.weight"):
        import_folder(tmp_path, tmp_path / "ours", config)
    assert not (tmp_path / "ours").exists()


def test_existing_output_is_not_overwritten(routed, tmp_path: Path):
    folder, checkpoint, config = routed
    with pytest.raises(EnvironmentProblem, match="exists"):
        to_hf(checkpoint, tmp_path, skeleton(config), config, folder)
    with pytest.raises(EnvironmentProblem, match="holds checkpoints already"):
        import_folder(folder, checkpoint.parent)


def test_tokenizer_files_and_generation_config_are_copied(routed, tmp_path: Path):
    folder, checkpoint, config = routed
    template = tmp_path / "template"
    template.mkdir()
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt", "notes.txt"):
        (template / name).write_text(name)
    (template / "config.json").write_text((folder / "config.json").read_text())
    export_checkpoint(checkpoint, tmp_path / "back", config, template)
    copied = {path.name: path.read_text() for path in (tmp_path / "back").iterdir() if path.suffix != ".safetensors"}
    del copied["config.json"]
    expected = {path.name for path in template.iterdir()} - {"notes.txt", "config.json"}
    assert copied == {name: name for name in expected}


def test_a_full_disk_leaves_no_files(routed, tmp_path: Path):
    folder, _, config = routed
    export = Export(weight_tensors(skeleton(config)), config, read_config(folder))
    storage = FaultyStorage()

    def values() -> Iterator[Tensor]:
        return (torch.zeros(tensor.like.shape, dtype=tensor.like.dtype) for tensor in export.tensors())

    write_folder(tmp_path / "fine", export, values(), folder, shard_bytes=20_000, storage=storage)
    for moment in range(0, len(storage.moments), 7):
        faulty = FaultyStorage(fail=lambda n, op, path, at=moment: disk_full(n, op, path) if n == at else None)
        with pytest.raises(OSError, match="No space left"):
            write_folder(tmp_path / "full", export, values(), folder, shard_bytes=20_000, storage=faulty)
        assert [path.name for path in tmp_path.iterdir()] == ["fine"], faulty.moments[-1]
