"""A quantisation recipe: int8 elements with one scale per 64 elements of a row, and per 64x64 elements of a weight.

pretrain_moe.py --import tests/examples/quantization_recipe.py --fp8-format e4m3 --fp8-recipe int8_blocks
    --emulate-low-precision ...

`--fp8-format` enables the recipe. It has no GPU kernels, so GEMMs multiply dequantised operands.
"""

from megatron_moe.config.precision import ElementFormat, OperandFormat, OperandFormats, QuantizationRecipe
from megatron_moe.config.registry import ELEMENTS, QUANTIZATION_RECIPES


def formats(*, hybrid, blocks=64):
    """Formats of inputs, weights and gradients; integers have no hybrid form. Tests use shorter blocks."""
    rows = OperandFormat(element="int8", block=(1, blocks), scale="fp32")
    weights = OperandFormat(element="int8", block=(blocks, blocks), scale="fp32")
    return OperandFormats(inputs=rows, weights=weights, grads=rows)


ELEMENTS.register("int8", ElementFormat(dtype="torch:int8", largest=127.0, is_integer=True))
QUANTIZATION_RECIPES.register("int8_blocks", QuantizationRecipe(formats=formats, label="INT8", row_alignment=64))
