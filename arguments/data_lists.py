"""Reads `--data-args-path` and `--per-split-data-args-path`: files that contain the values of dataset flags."""

import json
from pathlib import Path
from typing import Any

from arguments.errors import Problem
from arguments.parser import Setting, Settings
from arguments.values import BadValue, split_words

_SPLITS = ("train", "valid", "test")


def read_data_lists(settings: Settings) -> None:
    """Sets dataset flags from the files that `--data-args-path` and `--per-split-data-args-path` name; adds errors to
    `settings.problems`."""
    for name, read in (("data_args_path", _words), ("per_split_data_args_path", _splits)):
        path = settings.setting(name).value
        if path is None:
            continue
        try:
            listed = read(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            settings.problems.append(_problem(settings, name, f"cannot be read: {error.strerror}"))
        except (ValueError, RecursionError) as error:  # also UnicodeDecodeError and JSONDecodeError
            settings.problems.append(_problem(settings, name, str(error)))
        else:
            for flag, words in listed.items():
                _take(settings, name, flag, words)


def _words(text: str) -> dict[str, tuple[str, ...]]:
    return {"data_path": tuple(split_words(text))}


def _splits(text: str) -> dict[str, tuple[str, ...]]:
    """Parses JSON that maps train, valid or test to weights and prefixes; returns {'train_data_path': words, ...}."""
    content = json.loads(text)
    if not isinstance(content, dict) or not content or set(content) - set(_SPLITS):
        raise BadValue(f"must map {', '.join(_SPLITS)} to lists")
    return {f"{split}_data_path": _listed(content[split]) for split in _SPLITS if split in content}


def _listed(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, str):
        return tuple(split_words(entry))
    if not isinstance(entry, list) or not all(isinstance(word, str | int | float) for word in entry):
        raise BadValue("may contain only weights and prefixes")
    return tuple(map(str, entry))


def _take(settings: Settings, name: str, flag: str, words: tuple[str, ...]) -> None:
    path = settings.setting(name).value
    if settings.setting(flag).value not in ((), words):
        other = settings.registry.flags[flag].option
        settings.problems.append(_problem(settings, name, f"conflicts with {other}; give one of them"))
    else:
        settings.values[flag] = Setting(words, str(path))


def _problem(settings: Settings, name: str, what: str) -> Problem:
    option, setting = settings.registry.flags[name].option, settings.setting(name)
    return Problem(what=f"{option} {setting.value} {what}", given=((option, str(setting.value), setting.origin),))
