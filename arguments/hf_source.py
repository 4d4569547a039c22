"""Flags with which a run continues the model of a Hugging Face folder (`--load hf:DIR`)."""

import json
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments.errors import FlagErrors, Problem
from arguments.flags import Registry, with_dashes
from arguments.huggingface import TRAINING_FLAGS, model_with_flag, published_flags
from arguments.parser import Given, Settings
from megatron_moe.checkpoint.huggingface.config_reader import language_model
from megatron_moe.config.checkpoint import HUGGING_FACE
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.model_differences import config_differences

_LONGEST = 4096
"""Sequence length of a run that does not give `--seq-length`, unless the model has fewer positions."""
_MAX_COEFFICIENT = 0.1
"""Largest coefficient of a balancing loss that is taken from config.json. That of GPT-OSS has 0.9, which no one trains
with: transformers adds no such loss to that model by default."""
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class HFSource:
    """Flags derived from the Hugging Face folder of a published model that a run continues. Files and the command line
    override them."""

    folder: Path
    model: list[Given]
    """Flags of the model."""
    training: list[Given]
    """Flags of the tokenizer and the balancing loss, and values for required flags that the command line may omit."""
    notes: list[str]

    @property
    def layer(self) -> list[Given]:
        return [*self.training, *self.model]

    def note(self, settings: Settings) -> str:
        """Formats a line that lists every flag taken from the folder."""
        taken = [given for given in self.layer if _setting_of(given, settings) == given.origin]
        words = " ".join(" ".join((given.option, *_words(given))) for given in taken)
        return f"--load hf:{self.folder}: {words or 'the command line and its files give all flags'}"

    def contradictions(self, words: Sequence[Given], registry: Registry) -> list[Problem]:
        """Problems with flags of the command line that describe another model than the folder."""
        known = {with_dashes(given.option): given for given in self.model}
        unchanged = model_with_flag(self.model, None, registry)
        found = []
        for given in words:
            entry = registry.find(given.option)
            if entry is None or entry[0].name in TRAINING_FLAGS or entry[0].group not in ("model", "attention", "moe"):
                continue
            changed = model_with_flag(self.model, given, registry)
            if unchanged is None or changed is None or not config_differences(changed, unchanged):
                continue
            published = known.get(entry[0].option)
            value = entry[0].text(entry[0].default) if published is None else " ".join(_words(published))
            what = f"{' '.join((given.option, *(given.words or ())))} contradicts {value} of {self.folder}/config.json"
            remedy = "leave it out; a --config file may change the model on purpose"
            found.append(Problem(what=what, remedy=remedy))
        return found


def hf_source(layers: Sequence[Sequence[Given]], registry: Registry) -> HFSource | None:
    """Flags of the folder that the last `--load hf:DIR` names; None without one, or if it has no config.json and other
    flags describe the model.

    Raises FlagErrors if the folder is needed and has no config.json, if config.json describes a model that no flags
    describe, or if `--load DIR` without `hf:` names the folder of a published model, from which the run would not load.
    """
    given = [given for layer in layers for given in layer]
    loads = [each for each in given if with_dashes(each.option) == "--load" and each.words]
    location = (loads[-1].words or ("",))[0] if loads else ""
    folder = Path(location.removeprefix(HUGGING_FACE))
    if not location or not (folder / "config.json").is_file():
        if location.startswith(HUGGING_FACE) and not any(with_dashes(each.option) == "--hidden-size" for each in given):
            state = "has no config.json" if folder.is_dir() else "is not a folder"
            what = f"--load {location}: {folder} {state}, and no other flags describe the model"
            raise FlagErrors.of(what, "give the folder of a model, as save_pretrained writes it")
        return None
    if not location.startswith(HUGGING_FACE):
        if any(folder.glob("iter_*")):
            return None
        what = f"--load {location} is the folder of a Hugging Face model and has no checkpoint of a run"
        raise FlagErrors([Problem(what=what, remedy=f"--load {HUGGING_FACE}{location}")])
    return source_of(folder, registry)


def source_of(folder: Path, registry: Registry) -> HFSource:
    """Flags that describe the model of a Hugging Face folder or config.json, and its training defaults. Raises
    FlagErrors if no flags describe the model."""
    model, notes = published_flags(str(folder), registry)
    path = folder if folder.suffix == ".json" else folder / "config.json"
    values = language_model(json.loads(path.read_text(encoding="utf-8")))
    if not _has_mtp(path.parent, values):
        model = [given for given in model if given.option != "--mtp-num-layers"]
    origin = str(path)
    training = [Given(option, words, origin) for option, words in _training(path.parent, values).items()]
    return HFSource(folder, model, training, notes)


def command_line_of(folder: Path, registry: Registry) -> list[str]:
    """Command line of a run on random data with the model, tokenizer and defaults of a folder. Raises FlagErrors, and
    CheckpointProblem for values that no flag can have."""
    source = source_of(folder, registry)
    words = ["--from-hf-config", str(folder), "--mock-data", "--train-iters", "1", "--tokenizer-type", "NullTokenizer"]
    if not any(given.option == "--mtp-num-layers" for given in source.model):
        words += ["--mtp-num-layers", "0"]
    return words + [word for given in source.training for word in (given.option, *_words(given))]


def _training(folder: Path, values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    length = values.get("max_position_embeddings", _LONGEST)
    if not isinstance(length, int):
        what = f"max_position_embeddings is {length!r}, which is not an integer"
        raise CheckpointProblem(f"{folder / 'config.json'}: {what}")
    flags: dict[str, tuple[str, ...]] = {
        "--seq-length": (str(min(length, _LONGEST)),),
        "--micro-batch-size": ("1",),
        "--lr": ("1e-5",),
        "--moe-grouped-gemm": (),
    }
    if "bfloat16" in (values.get("dtype"), values.get("torch_dtype")):
        flags["--bf16"] = ()
    if (folder / "tokenizer.json").is_file():
        flags |= {"--tokenizer-type": ("HuggingFaceTokenizer",), "--tokenizer-model": (str(folder),)}
    elif (folder / "tokenizer.model").is_file():
        path = str(folder / "tokenizer.model")
        flags |= {"--tokenizer-type": ("SentencePieceTokenizer",), "--tokenizer-model": (path,)}
    coefficient = values.get("router_aux_loss_coef", values.get("aux_loss_alpha"))
    if isinstance(coefficient, int | float) and 0 < coefficient <= _MAX_COEFFICIENT:
        kind = "seq_aux_loss" if values.get("seq_aux") else "aux_loss"
        flags |= {"--moe-router-load-balancing-type": (kind,), "--moe-aux-loss-coeff": (f"{coefficient:g}",)}
    return flags


def _has_mtp(folder: Path, values: Mapping[str, Any]) -> bool:
    """Whether the weight files contain multi-token prediction: a layer after the last decoder layer, or tensors named
    `mtp.*`. False if the files cannot be read."""
    names: Mapping[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, struct.error):
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            with (folder / "model.safetensors").open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                names = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
    starts = f"model.layers.{values.get('num_hidden_layers')}.", "mtp."
    return any(name.startswith(starts) for name in names)


def _words(given: Given) -> tuple[str, ...]:
    return ("null",) if given.words is None else given.words


def _setting_of(given: Given, settings: Settings) -> str:
    """Origin of the value that the flag `given` has in the settings, as text."""
    entry = settings.registry.find(given.option)
    assert entry is not None, f"{given.option} is not a flag"
    return settings.setting(entry[0].name).origin
