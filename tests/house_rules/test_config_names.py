"""A config field that copies one flag has the flag's name, so that a search for the flag finds its effect."""

import ast
from collections.abc import Iterator
from importlib import import_module
from inspect import getsource

import pytest

from arguments.flag import docstrings
from arguments.flags import Registry
from tests.house_rules.source import Source, report, source, sources

EXCEPTIONS = {
    "ParallelConfig": ("tp", "pp", "cp", "ep", "etp"),  # the field's names of the axes, next to the derived dp and edp
    "OptimizerOffloadConfig": ("fraction",),  # of --optimizer-cpu-offload or of --chunked-optimizer-state-offload
}
RECORDED = (
    *(
        "attention",
        "linear_attention",
        "gated_delta_net",
        "kimi_delta_attention",
        "mamba",
        "mla",
        "dsa",
        "mlp",
        "moe",
        "model",
        "optimizer",
    ),
    *("compressed_attention", "hyper_connections", "transport"),
)
"""Files of megatron_moe/config whose fields may have another name than their flag: those that checkpoints record by
field name (model and learning-rate schedule), and options of transports that share a flag. A name that is not the end
of the flag's name names the flag in its docstring."""
FLAGS = Registry.declared().flags


def copies(file: Source) -> Iterator[tuple[str, str, str]]:
    """(class, field, flag) of every keyword argument of a config that is one flag, its conversion or its fallback."""
    for call in file.nodes:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            first = call.args[0] if call.args else call.func
            name = first.id if call.func.id == "from_flags" and isinstance(first, ast.Name) else call.func.id
            for keyword in call.keywords if name.endswith("Config") else ():
                flag = copied_flag(keyword.value)
                if keyword.arg and flag:
                    yield name, keyword.arg, flag


def copied_flag(value: ast.expr) -> str | None:
    match value:
        case ast.Attribute(value=ast.Name() | ast.Attribute(value=ast.Name(id="flags")), attr=name) if name in FLAGS:
            return name
        case ast.Call(args=[only], keywords=[]) | ast.BoolOp(op=ast.Or(), values=[only, ast.Constant()]):
            return copied_flag(only)
    return None


def name_findings(file: Source) -> list[str]:
    found = []
    for config, field, flag in copies(file):
        if field != flag and field not in EXCEPTIONS.get(config, ()) and not is_recorded(config, field, flag):
            found.append(f"{file.path}: {config}.{field} copies --{flag.replace('_', '-')}")
    return found


def is_recorded(config: str, field: str, flag: str) -> bool:
    for module in (import_module(f"megatron_moe.config.{name}") for name in RECORDED):
        if f"class {config}(" in getsource(module) or f"class {config}:" in getsource(module):
            texts = (docstrings(each).get(field, "") for each in getattr(module, config).__mro__[:-1])
            return flag.endswith(f"_{field}") or any(f"--{flag.replace('_', '-')}" in text for text in texts)
    return False


def test_a_field_that_copies_one_flag_has_its_name():
    files = [file for file in sources("arguments") if file.path.startswith("arguments/resolve")]
    report([finding for file in files for finding in name_findings(file)], "R3: config fields are named after flags")


@pytest.mark.parametrize(
    "call",
    [
        "LoopConfig(interval=training.exit_interval)",
        "from_flags(DataConfig, flags, cache=_path(flags.data.data_cache_path))",
        "LoggingConfig(project=logging.wandb_project or '')",
        "MLPConfig(has_bias=model.add_bias_linear)",
    ],
)
def test_a_field_with_another_name_is_found(call):
    assert len(name_findings(source("arguments/resolve.py", call))) == 1
