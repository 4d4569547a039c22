"""DeepSeek's quantised weights, blockwise FP8 and packed FP4, are read as bf16."""

import json
from math import ceil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.checkpoint.huggingface.folder import fp8_block, read_config
from megatron_moe.checkpoint.huggingface.load import load_hf
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.model import ModelConfig
from megatron_moe.kernels.reference.backend import bundle
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.context import ParallelContext
from tests.checkpoint.hf_models import configs, hf_model, saved
from tests.helpers.tolerances import EXACT

BLOCK = (16, 8)
"""Block size; smaller than 128 x 128, so that tiny matrices have several blocks and ragged edges."""
QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
MAX_E4M3 = 448.0


def is_quantised(name: str, tensor: Tensor) -> bool:
    """Whether DeepSeek quantises a weight: all but embedding, head, router and norms."""
    return tensor.dim() == 2 and not any(part in name for part in ("embed", "lm_head", "mlp.gate.weight"))


def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the FP8 values, the scales, and the dequantised bf16 values, computed block by block."""
    rows, columns = (ceil(size / block) for size, block in zip(weight.shape, BLOCK, strict=True))
    scale, quantised, read = torch.empty(rows, columns), torch.empty_like(weight), torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            place = (slice(row * BLOCK[0], (row + 1) * BLOCK[0]), slice(column * BLOCK[1], (column + 1) * BLOCK[1]))
            scale[row, column] = weight[place].abs().max() / MAX_E4M3
            quantised[place] = (weight[place] / scale[row, column]).to(torch.float8_e4m3fn).float()
            read[place] = quantised[place] * scale[row, column]
    return quantised.to(torch.float8_e4m3fn), scale, read.bfloat16()


def published(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Writes a DeepSeek-V3 model in FP8, and one with the dequantised weights."""
    saved(hf_model(configs()["deepseek_v3, yarn"]), folder)
    stored, read = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if is_quantised(name, tensor):
            stored[name], stored[f"{name}_scale_inv"], read[name] = quantise(tensor)
        else:
            stored[name] = read[name] = tensor.bfloat16()
    shapes = [tensor.shape for tensor in stored.values() if tensor.dtype == torch.float8_e4m3fn]
    assert sum(rows % BLOCK[0] > 0 or columns % BLOCK[1] > 0 for rows, columns in shapes) > 30, "ragged blocks"
    save_file(stored, folder / "model.safetensors")
    hf_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf_config, "quantization_config": QUANTISED}))
    return model_config_from_hf(hf_config), read


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of FP4."""


def packed_fp4(weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random FP4 codes of the shape of `weight`, two per byte, their E8M0 scales, and their values, element by
    element."""
    rows, columns = weight.shape
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    exponents = torch.randint(-9, 3, (rows, ceil(columns / 32)), generator=generator)
    stored, values = torch.empty(rows, columns // 2, dtype=torch.uint8), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            values[row, column] = E2M1[codes[row, column]] * 2.0 ** int(exponents[row, column // 32])
        for byte in range(columns // 2):
            stored[row, byte] = int(codes[row, 2 * byte]) + 16 * int(codes[row, 2 * byte + 1])
    return stored.view(torch.int8), (2.0 ** exponents.float()).to(torch.float8_e8m0fnu), values.bfloat16()


def published_v4(folder: Path, scale_dtype: torch.dtype) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Writes a DeepSeek-V4 model with experts in FP4 and other matrices in FP8; returns its weights as well."""
    saved(hf_model(configs()["deepseek_v4"]), folder)
    stored, read, generator = {}, {}, torch.Generator().manual_seed(3)
    for name, tensor in load_file(folder / "model.safetensors").items():
        scale = f"{name.removesuffix('weight')}scale"
        if ".experts." in name:
            stored[name], stored[scale], read[name] = packed_fp4(tensor, generator)
        elif tensor.dim() == 2 and ".w" in name.removesuffix(".weight"):
            stored[name], of_blocks, _ = quantise(tensor)
            stored[scale] = of_blocks.to(scale_dtype)
            spread = stored[scale].float().repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
            read[name] = (stored[name].float() * spread[: tensor.shape[0], : tensor.shape[1]]).bfloat16()
        else:
            stored[name] = read[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
    assert {t.dtype for t in stored.values()} >= {torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu, scale_dtype}
    save_file(stored, folder / "model.safetensors")
    hf_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf_config, "quantization_config": QUANTISED}))
    return model_config_from_hf(hf_config), read


def loaded(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    model = GPT(config, ParallelContext.single(dtype=torch.bfloat16), bundle())
    assert load_hf(folder, model, config) == []
    return {name: value.detach() for name, value in model.state_dict().items()}


def change(folder: Path, **tensors: Tensor | None) -> None:
    held = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors")


def test_fp8_blocks_are_dequantised_to_bf16(tmp_path: Path):
    check_values(tmp_path, *published(tmp_path))


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_fp4_experts_and_fp8_matrices_of_deepseek_v4_are_dequantised_to_bf16(scale_dtype: torch.dtype, tmp_path: Path):
    check_values(tmp_path, *published_v4(tmp_path, scale_dtype))


def check_values(folder: Path, config: ModelConfig, read: dict[str, Tensor]) -> None:
    """Compares the model that a quantised folder loads with that of a folder with the values `read`."""
    found = loaded(folder, config)
    plain = folder / "plain"
    plain.mkdir()
    save_file(read, plain / "model.safetensors")
    hf_config = {k: v for k, v in read_config(folder).items() if k != "quantization_config"}
    (plain / "config.json").write_text(json.dumps(hf_config))
    EXACT.check_all(found, loaded(plain, config), "weights")


NAME = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (None, f"{NAME} [12, 32] is FP8, but {NAME}_scale_inv or {NAME[:-6]}scale is missing"),
        (torch.ones(1, 5), f"{NAME}_scale_inv is [1, 5], blocks of {NAME} [12, 32] are [1, 4]"),
    ],
)
def test_missing_or_misshapen_scales_are_rejected_by_name(scale: Tensor | None, said: str, tmp_path: Path):
    config, _ = published(tmp_path)
    change(tmp_path, **{f"{NAME}_scale_inv": scale})
    with pytest.raises(CheckpointProblem) as caught:
        loaded(tmp_path, config)
    assert said in str(caught.value) and "1 quantised matrices do not match" in str(caught.value)


@pytest.mark.parametrize(
    ("scale", "said"), [(None, "w1.scale is missing"), (torch.ones(12, 2), "w1.scale is [12, 2], blocks of")]
)
def test_missing_or_misshapen_scales_of_packed_matrices_are_rejected(scale: Tensor | None, said: str, tmp_path: Path):
    config, _ = published_v4(tmp_path, torch.float32)
    change(tmp_path, **{"layers.1.ffn.experts.3.w1.scale": scale})
    with pytest.raises(CheckpointProblem) as caught:
        loaded(tmp_path, config)
    assert said in str(caught.value) and "layers.1.ffn.experts.3.w1.weight [12, 32]" in str(caught.value)


def test_minimax_names_the_format_like_torch():
    assert fp8_block({"quantization_config": {**QUANTISED, "fmt": "float8_e4m3fn"}}) == BLOCK


def test_a_scale_without_an_fp8_matrix_is_left_over(tmp_path: Path):
    config, _ = published(tmp_path)
    change(tmp_path, **{"model.norm.weight_scale_inv": torch.ones(1)})
    with pytest.raises(CheckpointProblem, match="left over: model.norm.weight_scale_inv"):
        loaded(tmp_path, config)


@pytest.mark.parametrize(
    "quantised",
    [
        {**QUANTISED, "weight_block_size": None},
        {**QUANTISED, "weight_block_size": [128]},
        {**QUANTISED, "fmt": "e5m2"},
        {"quant_method": "compressed-tensors"},
    ],
)
def test_other_quantisations_are_rejected(quantised: dict, tmp_path: Path):
    assert fp8_block({"quantization_config": quantised}) is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    with pytest.raises(CheckpointProblem, match=f"quantised by {quantised['quant_method']}"):
        read_config(tmp_path)
