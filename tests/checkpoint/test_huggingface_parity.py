"""Parity with transformers for the same weights: fp32 logits and gradients of the mean cross-entropy.

Tolerances are relative to the largest value of each tensor.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.checkpoint.huggingface.config_write import NoPublishedFamily, generated_config
from megatron_moe.checkpoint.huggingface.export import Export, write_folder, write_template
from megatron_moe.checkpoint.huggingface.folder import read_config
from megatron_moe.checkpoint.huggingface.load import load_hf, weight_tensors
from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.residual import AddedResidual
from megatron_moe.data.batch import MicrobatchContext, TokenMeta
from megatron_moe.data.tokenizer import load_tokenizer
from megatron_moe.kernels.reference.backend import bundle
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.context import ParallelContext
from tests.checkpoint.hf_models import VOCAB, configs, hf_model, saved, saved_gradients, tokens
from tests.data.test_tokenizer import train_sentencepiece
from tests.helpers.tolerances import EXACT, FP32_PARITY

CONFIGS = configs()
WEIGHTS = "model.safetensors"


def ours(config: ModelConfig, folder: Path) -> GPT:
    model = GPT(config, ParallelContext.single(dtype=torch.float32), bundle())
    load_hf(folder, model, config)
    return model


def our_logits(model: GPT, tokens_BS: Tensor) -> Tensor:
    """Computes logits [B, S, V]."""
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    return model.logits(tokens_BS, MicrobatchContext(tokens=TokenMeta(positions_BS=positions_BS))).transpose(0, 1)


def mean_loss(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    """Mean next-token cross-entropy."""
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())


def model_of(
    hf_config: transformers.PretrainedConfig, folder: Path
) -> tuple[transformers.PreTrainedModel, ModelConfig]:
    """Saves a transformers model to the folder; returns it with the config read from there."""
    published = hf_model(hf_config)
    saved(published, folder)
    return published, model_config_from_hf(read_config(folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path):
    published, config = model_of(CONFIGS[name], tmp_path / "weights")
    model = ours(config, tmp_path / "weights")
    tokens_BS = tokens()

    expected, actual = published(tokens_BS).logits, our_logits(model, tokens_BS)
    FP32_PARITY.check(actual, expected, "logits")

    mean_loss(expected, tokens_BS).backward()
    mean_loss(actual, tokens_BS).backward()
    gradients = ours(config, saved_gradients(published, tmp_path / "gradients"))
    # the cross-entropy does not train indexers, so they have no gradients in either program
    FP32_PARITY.check_all(
        {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()},
        {parameter: value.detach() for parameter, value in gradients.named_parameters()},
        "gradients",
    )


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3, yarn", "gpt_oss, yarn"])
def test_every_expert_and_parameter_has_a_gradient(name: str, tmp_path: Path):
    _, config = model_of(CONFIGS[name], tmp_path)
    model, tokens_BS = ours(config, tmp_path), tokens()
    mean_loss(our_logits(model, tokens_BS), tokens_BS).backward()
    for parameter, value in model.named_parameters():
        per_expert = value.grad.flatten(1) if value.meta.num_experts else value.grad.reshape(1, -1)
        assert per_expert.abs().amax(dim=1).min() > 1e-5, parameter


def deep_replace(config: Any, path: str, value: Any) -> Any:
    head, _, rest = path.partition(".")
    return replace(config, **{head: deep_replace(getattr(config, head), rest, value) if rest else value})


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("mixtral", "norm.eps", 1e-3),
        ("mixtral", "mixer.rope.base", 10000.0),
        ("mixtral with a window", "mixer.core.window", (5, 0)),
        ("qwen2_moe", "feed_forward.router.pre_softmax", False),
        ("qwen3_moe", "mixer.norm.eps", 1e-3),
        ("olmoe, llama3 rope", "mixer.rope.low_freq_factor", 2.0),
        ("deepseek_v2 lite, yarn", "mixer.rope.mscale", 1.0),
        ("deepseek_v2 lite, yarn", "mixer.core.softmax_scale", 16**-0.5),
        ("deepseek_v2 with q latent", "mixer.norm.eps", 1e-4),
        ("deepseek_v3, yarn", "mixer.rope.interleaved", False),
        ("deepseek_v3, yarn", "mixer.rope.beta_slow", 0.1),
        ("deepseek_v3, yarn", "feed_forward.router.expert_bias", False),
        ("deepseek_v3, yarn", "feed_forward.router.num_groups", 2),
        ("deepseek_v3, yarn", "feed_forward.router.scaling_factor", None),
        ("gpt_oss, yarn", "mixer.rope.truncate", True),
        ("gpt_oss, yarn", "mixer.rope.concentration", 1.0),
        ("gpt_oss, yarn", "feed_forward.experts.activation.clamp", None),
        ("gpt_oss, yarn", "feed_forward.experts.activation.linear_offset", 0.0),
        ("glm4_moe", "mixer.rope.dim", 16),
        ("deepseek_v32", "mixer.indexer.topk", 6),
        ("deepseek_v32", "mixer.indexer.rope.interleaved", True),
        ("deepseek_v32", "mixer.indexer.relu", False),
        ("glm_moe_dsa", "mixer.indexer.rope.interleaved", False),
        ("glm_moe_dsa, shared keys", "mixer.core.softmax_scale", 0.1),
    ],
)
def test_one_wrong_config_field_in_one_layer_is_detected(name: str, field: str, value: Any, tmp_path: Path):
    """Each mistake changes the logits by more than the tolerance."""
    published, config = model_of(CONFIGS[name], tmp_path)
    wrong = replace(config, layers=(*config.layers[:-1], deep_replace(config.layers[-1], field, value)))
    model = GPT(wrong, ParallelContext.single(dtype=torch.float32), bundle())
    right = dict(ours(config, tmp_path).state_dict())
    model.load_state_dict({key: right[key] for key in model.state_dict()})
    expected = published(tokens()).logits
    assert FP32_PARITY.problem(our_logits(model, tokens()), expected, "logits") is not None


def test_separate_layers_of_multi_token_prediction_are_not_used(tmp_path: Path):
    """Published folders of Qwen3-Next contain them; transformers does not load them either."""
    _, config = model_of(CONFIGS["qwen3_next, odd"], tmp_path)
    save_file({**load_file(tmp_path / WEIGHTS), "mtp.fc.weight": torch.ones(32, 64)}, tmp_path / WEIGHTS)
    model = GPT(config, ParallelContext.single(dtype=torch.float32), bundle())
    assert load_hf(tmp_path, model, config) == ["1 tensors not used: mtp.fc.weight"]


def test_vocabulary_padding_does_not_change_logits(tmp_path: Path):
    published, config = model_of(CONFIGS["mixtral"], tmp_path)
    padded = our_logits(ours(replace(config, vocab_size=96), tmp_path), tokens())
    FP32_PARITY.check(padded[..., :VOCAB], published(tokens()).logits, "logits")
    EXACT.check(padded[..., VOCAB:], torch.zeros(2, 24, 96 - VOCAB), "logits of padding rows")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_generated_config_has_the_logits_of_the_published_one(name: str, tmp_path: Path):
    published, config = model_of(CONFIGS[name], tmp_path / "weights")
    weights, values = weight_tensors(ours(config, tmp_path / "weights")), generated_config(config, VOCAB)
    export = Export(weights, config, values)
    read = export.stream(lambda each: weights[each.name] if each.expert is None else weights[each.name][each.expert])
    write_template(tmp_path, values, TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB))
    write_folder(tmp_path / "out", export, read, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
    )
    assert [type(model).__name__] == values["architectures"] and (tmp_path / "out/generation_config.json").is_file()
    tokens_BS = tokens()
    # Qwen3.5-MoE is exported as Qwen3-Next, which computes the same function with other GEMMs
    tolerance = EXACT if isinstance(published, type(model)) else FP32_PARITY
    tolerance.check_all({"logits": model.eval()(tokens_BS).logits}, {"logits": published(tokens_BS).logits}, name)


SIGMOID = ("deepseek_v3, yarn", "deepseek_v2 lite, yarn", "glm4_moe", "dots1, groups", "kimi_linear", "ernie4_5_moe")


@torch.no_grad()
@pytest.mark.parametrize("name", SIGMOID)
def test_a_model_without_shared_experts_is_exported(name: str, tmp_path: Path):
    """transformers rejects null as their number."""
    _, config = model_of(CONFIGS[name], tmp_path / "weights")
    layers = [
        replace(layer, feed_forward=replace(layer.moe, shared=None)) if layer.is_moe else layer
        for layer in config.layers
    ]
    values_with = ours(config, tmp_path / "weights").state_dict()
    config = replace(config, layers=tuple(layers))
    model = GPT(config, ParallelContext.single(dtype=torch.float32), bundle())
    model.load_state_dict({key: values_with[key] for key in model.state_dict()})
    weights, values = weight_tensors(model), generated_config(config, VOCAB)
    export = Export(weights, config, values)
    read = export.stream(lambda each: weights[each.name] if each.expert is None else weights[each.name][each.expert])
    write_template(tmp_path, values, TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB))
    write_folder(tmp_path / "out", export, read, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    FP32_PARITY.check(loaded.eval()(tokens()).logits, our_logits(model, tokens()), name)


def test_a_model_of_no_family_is_rejected(tmp_path: Path):
    _, config = model_of(CONFIGS["qwen3_moe"], tmp_path)
    mixed = replace(
        config, layers=(replace(config.layers[0], residual=AddedResidual(from_norm=True)), *config.layers[1:])
    )
    with pytest.raises(NoPublishedFamily, match="the nearest, qwen3_moe, differs") as caught:
        generated_config(mixed, VOCAB)
    assert caught.value.nearest is not None


@pytest.mark.parametrize("options", [{}, {"add_dummy_prefix": True, "bos_id": 2, "eos_id": 3}], ids=["plain", "prefix"])
def test_an_exported_sentencepiece_tokenizer_gives_the_ids_of_the_run(options, tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "corpus.model", user_defined_symbols=["<eod>"], **options)
    tokenizer = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    (tmp_path / "hf").mkdir()
    write_template(tmp_path / "hf", {"model_type": "qwen3_moe"}, tokenizer)
    ours, exported = load_tokenizer(tokenizer), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert len(exported) == ours.vocab_size and exported.eos_token_id == ours.eod
    texts = ["the cat sat", "a  dog", "\tself.read\n", "für é"]
    for text in texts if options else [*texts, " on the mat"]:  # transformers adds no second leading space
        assert exported(text)["input_ids"] == ours.encode(text), text


def test_an_exported_hugging_face_tokenizer_gives_the_ids_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.train_from_iterator(["the cat sat", "self.read"] * 9, trainer)
    trained.save(str(path))
    tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path)
    (tmp_path / "hf").mkdir()
    write_template(tmp_path / "hf", {"model_type": "qwen3_moe"}, tokenizer)
    ours, exported = load_tokenizer(tokenizer), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert len(exported) == ours.vocab_size
    for text in ("the cat sat", "self.read sat the"):
        assert exported(text)["input_ids"] == ours.encode(text) != [], text
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert settings.eos_token_id == ours.eod == trained.token_to_id("<|endoftext|>")
