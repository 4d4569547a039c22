"""Makes `quantizers.json`: digests of the results of Transformer Engine's Python quantisers.

    git clone --depth 1 --branch v2.20 https://github.com/NVIDIA/TransformerEngine DIRECTORY
    PYTHONPATH=.:DIRECTORY python tests/data_files/transformer_engine/make.py DIRECTORY

Runs on a CPU. The references import compiled modules of Transformer Engine, which are replaced by empty ones.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import torch
from torch import Tensor

from tests.precision.quantizer_cases import cases, digests, make_input

BLOCKS = {"1x128": (1, 128), "128x128": (128, 128)}
ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Quantizer:
    """Stub of the base class of the reference quantisers."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


def reference(folder: Path, *path: str) -> ModuleType:
    """Loads one Python file of Transformer Engine."""
    file = folder.joinpath(*path)
    spec = importlib.util.spec_from_file_location(".".join(path).removesuffix(".py"), file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def results(name: str, x: Tensor, modules: tuple[ModuleType, ModuleType, ModuleType]) -> dict[str, Tensor]:
    """Quantises x; returns data and scales of both copies, in the layout of `QuantizedTensor`."""
    blockwise, current, nvfp4 = modules
    recipe, *options = name.split()
    if recipe == "blockwise":
        block, element, scale = options
        quantizer = blockwise.BlockwiseQuantizerReference()
        made = quantizer.quantize(
            x, ELEMENTS[element], return_transpose=True, pow_2_scales=scale == "pow2", quant_tile_shape=BLOCKS[block]
        )
        rows, columns = (x.shape[0], x.shape[1]) if block == "1x128" else (-(-x.shape[1] // 128), -(-x.shape[0] // 128))
        return {
            "rowwise": made.data,
            "rowwise_scales": made.scale[:, :rows],
            "columnwise": made.data_t,
            "columnwise_scales": made.scale_t[:, :columns],
        }
    if recipe == "tensorwise":
        data, scale, data_t, _ = current.CurrentScalingQuantizerRef(ELEMENTS[options[0]])._quantize(x)
        return {"rowwise": data, "rowwise_scales": scale[0], "columnwise": data_t, "columnwise_scales": scale[0]}
    block = (16, 16) if options == ["16x16"] else (1, 16)
    quantizer = nvfp4.NVFP4QuantizerRef("e2m1", quant_tile_shape=block, with_rht=block[0] == 1)
    data, scales, data_t, scales_t, *_ = quantizer._quantize(x)
    if block[0] == 16:
        scales, scales_t = scales[::16], scales_t[::16]
    else:
        scales, scales_t = scales.T, scales_t.T
    return {"rowwise": data, "rowwise_scales": scales, "columnwise": data_t, "columnwise_scales": scales_t}


def main(folder: Path) -> None:
    package = ("transformer_engine", "pytorch", "custom_recipes")
    for depth in range(1, 4):
        sys.modules[".".join(package[:depth])] = MagicMock()
    sys.modules["transformer_engine.pytorch.quantized_tensor"] = stub = ModuleType("quantized_tensor")
    stub.Quantizer, stub.QuantizedTensorStorage = Quantizer, object
    references = folder / "tests" / "pytorch" / "references"
    for name in ("tests.pytorch", "tests.pytorch.references"):
        sys.modules[name] = ModuleType(name)
    sys.modules["tests.pytorch.references.quantize_scale_calc"] = reference(references, "quantize_scale_calc.py")
    modules = (
        reference(references, "blockwise_quantizer_reference.py"),
        reference(folder, *package, "reference_current_scaling.py"),
        reference(folder, *package, "reference_nvfp4.py"),
    )
    made = {
        name: digests(results(recipe, make_input(shape, kind, dtype), modules))
        for name, recipe, shape, kind, dtype in cases()
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in made.items())
    Path(__file__).with_name("quantizers.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
