"""Parity of multi-token prediction with the MTP layer of transformers, with weights in the published format.

The transformers layer drafts one token at a time; called directly with a causal mask it returns all positions.
"""

import copy
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.checkpoint.huggingface.config_write import generated_config
from megatron_moe.checkpoint.huggingface.export import Export, write_folder
from megatron_moe.checkpoint.huggingface.folder import read_config
from megatron_moe.checkpoint.huggingface.load import load_hf, weight_tensors
from megatron_moe.config.attention import AttentionConfig
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.model import ModelConfig
from megatron_moe.data.batch import MicroBatch, MicrobatchContext, TokenMeta
from megatron_moe.kernels.reference.backend import bundle
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.context import ParallelContext
from tests.checkpoint.hf_models import configs, fill, hf_model, saved, tokens
from tests.helpers.tolerances import EXACT, FP32_MODEL

CONFIGS = configs()
OWN = ("enorm", "hnorm", "eh_proj")
QWEN_NAMES = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm",
}  # fmt: skip
"""Names of DeepSeek-V3, and those of Qwen3-Next, which has a single MTP layer."""
QWEN_SHARED = ("mtp.layers.0.embed_tokens.weight", "mtp.layers.0.shared_head.head.weight")
"""Copies of shared tensors, which folders of Qwen3-Next omit."""


@dataclass
class Oracle:
    """A model of transformers with its MTP layer."""

    main: transformers.PreTrainedModel
    draft: MtpModel

    def losses(self, tokens_BS: Tensor) -> Tensor:
        """Loss [B, S - 2] of the MTP layer: -log p(token t + 2 | tokens 0 .. t + 1)."""
        hidden_BSH = self.main.model(tokens_BS).last_hidden_state[:, :-1]
        batch, length = hidden_BSH.shape[:2]
        positions_BS = torch.arange(length).expand(batch, length)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        ahead_BSH = self.draft.layers[0](
            self.main.model.embed_tokens(tokens_BS[:, 1:]),
            hidden_BSH,
            position_embeddings=self.main.model.rotary_emb(hidden_BSH, positions_BS),
            attention_mask=mask,
            position_ids=positions_BS,
            past_key_values=None,
        )
        logits_BSV = self.main.lm_head(ahead_BSH[:, :-1])
        return F.cross_entropy(logits_BSV.transpose(1, 2), tokens_BS[:, 2:], reduction="none")


def published(hf_config: transformers.PretrainedConfig, folder: Path) -> Oracle:
    """Writes a folder in the published layout of DeepSeek and GLM, because transformers does not save MTP layers.

    The layer is taken from a model with one more layer, so that its tensors have the published names.
    """
    changes: dict[str, Any] = {"num_hidden_layers": hf_config.num_hidden_layers + 1}
    if is_qwen(hf_config):
        hf_config = copy.deepcopy(hf_config)
        changes["layer_types"] = [*hf_config.layer_types, "full_attention"]
        hf_config.num_mtp_layers, hf_config.mtp_layer_types = 1, ["full_attention"]
    longer_config = type(hf_config)(**{**hf_config.to_dict(), **changes})
    longer = hf_model(longer_config)
    main = hf_model(hf_config)
    main.load_state_dict({name: longer.state_dict()[name] for name in main.state_dict()})
    draft = MtpModel(main, 1)
    fill(draft.layers[0], seed=8)
    draft.layers[0].mtp_block = longer.model.layers[hf_config.num_hidden_layers]
    write(Oracle(main, draft), longer, folder)
    return Oracle(main, draft)


def is_qwen(hf_config: transformers.PretrainedConfig) -> bool:
    """Whether the names of the MTP layer are those of Qwen3-Next."""
    return hf_config.model_type.startswith("qwen3")


def write(oracle: Oracle, longer: transformers.PreTrainedModel, folder: Path) -> None:
    saved(longer, folder)
    layer, prefix = oracle.draft.layers[0], f"model.layers.{oracle.main.config.num_hidden_layers}"
    extra = {f"{prefix}.{name}.weight": getattr(layer, name).weight for name in OWN}
    extra[f"{prefix}.shared_head.norm.weight"] = layer.post_norm.weight
    extra[f"{prefix}.shared_head.head.weight"] = oracle.main.lm_head.weight
    extra[f"{prefix}.embed_tokens.weight"] = oracle.main.model.embed_tokens.weight
    tensors = {**load_file(folder / "model.safetensors"), **extra}
    if is_qwen(oracle.main.config):
        own = {name: f"mtp.{new}.weight" for name, new in QWEN_NAMES.items()}
        own = {f"{prefix}.{name}.weight": new for name, new in own.items()}
        tensors = {own.get(name, name.replace(prefix, "mtp.layers.0")): value for name, value in tensors.items()}
        tensors = {name: value for name, value in tensors.items() if name not in QWEN_SHARED}
    save_file({name: value.detach().clone() for name, value in tensors.items()}, folder / "model.safetensors")
    oracle.main.config.save_pretrained(folder)


@pytest.mark.parametrize("name", ["deepseek_v3, yarn", "glm4_moe", "qwen3_next", "qwen3_5_moe, odd"])
def test_the_drafting_layer_of_transformers_gives_the_same_losses_and_gradients(name: str, tmp_path: Path):
    oracle = published(CONFIGS[name], tmp_path)
    count = "mtp_num_hidden_layers" if is_qwen(oracle.main.config) else "num_nextn_predict_layers"
    config = model_config_from_hf({**read_config(tmp_path), count: 1}, mtp=True)
    model = GPT(config, ParallelContext.single(dtype=torch.float32), bundle())
    notes = load_hf(tmp_path, model, config)
    assert [note[:18] for note in notes] == ([] if is_qwen(oracle.main.config) else ["2 tensors not used"])

    tokens_BS = tokens()
    expected = oracle.losses(tokens_BS)
    batch = MicroBatch(
        tokens_BS=tokens_BS[:, :-1],
        labels_BS=tokens_BS[:, 1:],
        loss_mask_BS=torch.ones(2, 23),
        context=MicrobatchContext(tokens=TokenMeta(positions_BS=torch.arange(23).expand(2, 23))),
    )
    ((loss_BS, weights_BS, _),) = model(batch).mtp_losses
    FP32_MODEL.check(loss_BS[:, :-1], expected, "losses")
    FP32_MODEL.check(weights_BS[:, -1], torch.zeros(2), "weight of the last place, which has no label")

    expected.sum().backward()
    (loss_BS * weights_BS).sum().backward()
    own = oracle.draft.layers[0]
    for ours, theirs in (
        ("enorm", own.enorm),
        ("hnorm", own.hnorm),
        ("eh_proj", own.eh_proj),
        ("final_layernorm", own.post_norm),
    ):
        FP32_MODEL.check(model.get_parameter(f"mtp.layers.0.{ours}.weight").grad, theirs.weight.grad, ours)
    router = model.get_parameter("mtp.layers.0.transformer_layer.mlp.router.weight")
    FP32_MODEL.check(router.grad, own.mtp_block.mlp.gate.weight.grad, "router")
    embedding = oracle.main.model.embed_tokens.weight
    FP32_MODEL.check(model.get_parameter("embedding.word_embeddings.weight").grad, embedding.grad, "embedding")


@torch.no_grad()
def write_tensors(weights: dict[str, Tensor], config: ModelConfig, hf_config: dict[str, Any], folder: Path) -> None:
    """Exports the weights of a model with MTP layers to `folder`/out, with the other files of `folder`/hf."""
    export = Export(weights, config, hf_config)
    of_mtp = sum(tensor.name.startswith("mtp.") for tensor in export.tensors())
    assert of_mtp and export.notes == [
        f"the model class of transformers ignores {of_mtp} tensors of multi-token prediction"
    ]
    read = export.stream(lambda each: weights[each.name] if each.expert is None else weights[each.name][each.expert])
    write_folder(folder / "out", export, read, folder / "hf")


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_next, odd"])
def test_the_layer_of_qwen3_next_round_trips_exactly(name: str, tmp_path: Path):
    """In the second model, the MTP layer has attention but the last regular layer has a delta net."""
    published(CONFIGS[name], tmp_path / "hf")
    config = model_config_from_hf(read_config(tmp_path / "hf"), mtp=True)
    assert isinstance(config.mtp_layer.mixer, AttentionConfig)
    model = GPT(config, ParallelContext.single(dtype=torch.float32), bundle())
    load_hf(tmp_path / "hf", model, config)
    weights = weight_tensors(model)
    write_tensors(weights, config, read_config(tmp_path / "hf"), tmp_path)
    written, given = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "hf"))
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_norm.weight"} <= written.keys()
    EXACT.check_all(written, given, "tensors")
    assert read_config(tmp_path / "out")["mtp_num_hidden_layers"] == 1


def test_a_layer_that_no_folder_describes_is_rejected(tmp_path: Path):
    """The MTP layer of Qwen3-Next has attention, whatever the last layer has."""
    published(CONFIGS["qwen3_next, odd"], tmp_path)
    values = read_config(tmp_path)
    config = model_config_from_hf(values, mtp=True)
    assert config.mtp is not None and config.mtp.layer is not None
    config = replace(config, mtp=replace(config.mtp, layer=None))
    model = GPT(config, ParallelContext.single(dtype=torch.float32, device="meta"), bundle())
    with pytest.raises(CheckpointProblem, match="layer of multi-token prediction: mixer: .*, published"):
        Export(weight_tensors(model), config, values)


@torch.no_grad()
def test_the_layer_of_deepseek_v4_has_names_and_projections_of_its_own(tmp_path: Path):
    """transformers does not load this layer. Exports omit rows of the padded vocabulary, including those of the tables
    that map ids to experts."""
    hf_config = read_config(saved(hf_model(CONFIGS["deepseek_v4"]), tmp_path / "hf"))
    config = model_config_from_hf(hf_config, mtp=True)
    first, *others = config.layers
    router = replace(first.moe.router, hash_vocab_size=64)
    first = replace(first, feed_forward=replace(first.moe, router=router))
    config = replace(config, vocab_size=64, layers=(first, *others))
    model, copy = (GPT(config, ParallelContext.single(dtype=torch.float32), bundle()) for _ in range(2))
    weights = weight_tensors(model)
    for number, (name, tensor) in enumerate(weights.items()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % (101 + number))
        if name.endswith(("word_embeddings.weight", "output_layer.weight", "expert_table")):
            tensor[61:] = 0
    write_tensors(weights, config, hf_config, tmp_path)
    written = load_file(tmp_path / "out/model.safetensors")
    own = {name.removeprefix("mtp.0.") for name in written if name.startswith("mtp.")}
    assert {"enorm.weight", "hnorm.weight", "norm.weight", "hc_head_fn", "hc_attn_scale", "ffn.gate.bias"} <= own
    assert not any(name.startswith("layers.3.") or "compressor" in name for name in own) and "attn.wq_a.weight" in own
    joined = weights["mtp.layers.0.eh_proj.weight"]
    of_embedding, of_hidden = (written[f"mtp.0.{name}.weight"] for name in ("e_proj", "h_proj"))
    EXACT.check_all({"e": of_embedding, "h": of_hidden}, {"e": joined[:, :32], "h": joined[:, 32:]}, "projections")
    assert written["layers.0.ffn.gate.tid2eid"].shape == (61, 3)
    load_hf(tmp_path / "out", copy, config)
    EXACT.check_all(copy.state_dict(), model.state_dict(), "state")


def nemotron(folder: Path, name: str) -> tuple[transformers.PreTrainedModel, dict[str, Tensor]]:
    """Writes a folder with the published names of Nemotron-3's multi-token prediction, which transformers ignores: its
    attention and its experts are two layers, like those of the decoder. Returns the model with these as its last layers
    and the tensors before and after them by name."""
    main = CONFIGS[name]
    kinds = ["full_attention", "moe"]
    longer_config = copy.deepcopy(main)
    longer_config.layers_block_type = [*main.layers_block_type, *kinds]
    longer = hf_model(longer_config)
    saved(longer, folder)
    generator, hidden, first = torch.Generator().manual_seed(9), main.hidden_size, main.num_hidden_layers
    own = {f"mtp.layers.0.{name}.weight": torch.rand(hidden, generator=generator) + 0.5 for name in ("enorm", "hnorm")}
    own["mtp.layers.1.final_layernorm.weight"] = torch.rand(hidden, generator=generator) + 0.5
    own["mtp.layers.0.eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
    tensors = load_file(folder / "model.safetensors")
    for index in range(2):
        before = f"backbone.layers.{first + index}."
        for old in [name for name in tensors if name.startswith(before)]:
            tensors[old.replace(before, f"mtp.layers.{index}.")] = tensors.pop(old)
    save_file(tensors | own, folder / "model.safetensors")
    main = copy.deepcopy(main)
    main.num_nextn_predict_layers, main.mtp_layers_block_type = 1, kinds
    main.save_pretrained(folder)
    return longer, own


def nemotron_losses(longer: transformers.PreTrainedModel, own: dict[str, Tensor], tokens_BS: Tensor) -> Tensor:
    """Loss [B, S - 2] of multi-token prediction: -log p(token t + 2 | tokens 0 .. t + 1)."""
    main = longer.model
    depth, main.layers = main.layers[-2:], main.layers[:-2]
    hidden_BSH, ahead_BSH = main(tokens_BS).last_hidden_state[:, :-1], main.embeddings(tokens_BS[:, 1:])
    eps = longer.config.layer_norm_epsilon

    def norm(x_BSH: Tensor, name: str) -> Tensor:
        return F.rms_norm(x_BSH, x_BSH.shape[-1:], own[f"mtp.layers.{name}.weight"], eps)

    joined_BSC = torch.cat([norm(ahead_BSH, "0.enorm"), norm(hidden_BSH, "0.hnorm")], dim=-1)
    x_BSH = joined_BSC @ own["mtp.layers.0.eh_proj.weight"].T
    mask = torch.full((x_BSH.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    for layer in depth:
        x_BSH = layer(x_BSH, attention_mask=mask)
    logits_BSV = longer.lm_head(norm(x_BSH, "1.final_layernorm")[:, :-1])
    return F.cross_entropy(logits_BSV.transpose(1, 2), tokens_BS[:, 2:], reduction="none")


@torch.no_grad()
@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h, groups"])
def test_the_layer_of_nemotron_has_the_losses_and_round_trips_exactly(name: str, tmp_path: Path):
    longer, own = nemotron(tmp_path / "hf", name)
    hf_config = read_config(tmp_path / "hf")
    config = model_config_from_hf(hf_config, mtp=True)
    assert isinstance(config.mtp_layer.mixer, AttentionConfig) and config.mtp_layer.is_moe
    model = GPT(config, ParallelContext.single(dtype=torch.float32), bundle())
    assert load_hf(tmp_path / "hf", model, config) == []
    tokens_BS = tokens()
    batch = MicroBatch(
        tokens_BS=tokens_BS[:, :-1],
        labels_BS=tokens_BS[:, 1:],
        loss_mask_BS=torch.ones(2, 23),
        context=MicrobatchContext(tokens=TokenMeta(positions_BS=torch.arange(23).expand(2, 23))),
    )
    ((loss_BS, _, _),) = model(batch).mtp_losses
    FP32_MODEL.check(loss_BS[:, :-1], nemotron_losses(longer, own, tokens_BS), "losses")

    weights = weight_tensors(model)
    written_config = generated_config(config, config.vocab_size)
    for values in (hf_config, written_config):
        write_tensors(weights, config, values, tmp_path)
        written, given = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "hf"))
        EXACT.check_all(written, given, "tensors")
        assert read_config(tmp_path / "out")["num_nextn_predict_layers"] == 1
        shutil.rmtree(tmp_path / "out")
    shared = replace(config, mtp=replace(config.mtp, num_layers=3, repeated_layer=True))
    assert Export(weights, shared, hf_config).hf_config["num_nextn_predict_layers"] == 1
