"""Parity of multi-token prediction with the MTP layer of transformers, with weights in the published format.

The transformers layer drafts one token at a time; called directly with a causal mask it returns all positions.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.checkpoint.huggingface.folder import read_config
from megatron_moe.checkpoint.huggingface.load import load_hf
from megatron_moe.data.batch import MicroBatch, MicrobatchContext, TokenMeta
from megatron_moe.kernels.reference.backend import bundle
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.context import ParallelContext
from tests.checkpoint.hf_models import configs, fill, hf_model, saved, tokens
from tests.helpers.tolerances import FP32_MODEL

CONFIGS = configs()
OWN = ("enorm", "hnorm", "eh_proj")


@dataclass
class Oracle:
    """The model, and its drafting layer."""

    main: transformers.PreTrainedModel
    draft: MtpModel

    def losses(self, tokens_BS: Tensor) -> Tensor:
        """-log p(token t + 2) from the drafting layer, which sees tokens 0 .. t + 1: [B, S - 2]."""
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
    """Writes a folder as DeepSeek and GLM publish theirs: transformers itself saves no such layer.

    The layer comes from a model that has one layer more, so that its tensors get their names in files.
    """
    longer_config = type(hf_config)(**{**hf_config.to_dict(), "num_hidden_layers": hf_config.num_hidden_layers + 1})
    longer = hf_model(longer_config)
    main = hf_model(hf_config)
    main.load_state_dict({name: longer.state_dict()[name] for name in main.state_dict()})
    draft = MtpModel(main, 1)
    fill(draft.layers[0], seed=8)
    draft.layers[0].mtp_block = longer.model.layers[hf_config.num_hidden_layers]
    write(Oracle(main, draft), longer, folder)
    return Oracle(main, draft)


def write(oracle: Oracle, longer: transformers.PreTrainedModel, folder: Path) -> None:
    saved(longer, folder)
    layer, prefix = oracle.draft.layers[0], f"model.layers.{oracle.main.config.num_hidden_layers}"
    extra = {f"{prefix}.{name}.weight": getattr(layer, name).weight for name in OWN}
    extra[f"{prefix}.shared_head.norm.weight"] = layer.post_norm.weight
    extra[f"{prefix}.shared_head.head.weight"] = oracle.main.lm_head.weight
    extra[f"{prefix}.embed_tokens.weight"] = oracle.main.model.embed_tokens.weight
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, **{name: value.detach().clone() for name, value in extra.items()}}, folder / "model.safetensors"
    )
    oracle.main.config.save_pretrained(folder)


@pytest.mark.parametrize("name", ["deepseek_v3, yarn", "glm4_moe"])
def test_the_drafting_layer_of_transformers_gives_the_same_losses_and_gradients(name: str, tmp_path: Path):
    oracle = published(CONFIGS[name], tmp_path)
    config = model_config_from_hf({**read_config(tmp_path), "num_nextn_predict_layers": 1}, mtp=True)
    model = GPT(config, ParallelContext.single(dtype=torch.float32), bundle())
    (note,) = load_hf(tmp_path, model, config)
    assert note.startswith("2 tensors not used")

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
