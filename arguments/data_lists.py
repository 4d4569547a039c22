"""Files that list data sets: `--data-args-path` and `--per-split-data-args-path` stand for the flags they hold."""

import json
from pathlib import Path
from typing import Any

from arguments.errors import Problem
from arguments.parser import Setting, Settings
from arguments.values import BadValue, cut

_SPLITS = ("train", "valid", "test")


def read_data_lists(settings: Settings) -> None:
    """Puts what the files list in the place of the flags that it could be given by; what is wrong becomes a problem."""
    for name, read in (("data_args_path", _words), ("per_split_data_args_path", _splits)):
        path = settings.setting(name).value
        if path is None:
            continue
        try:
            listed = read(Path(path).read_text(encoding="utf-8"))
        except OSError as trouble:
            settings.problems.append(_problem(settings, name, f"cannot be read: {trouble.strerror}"))
        except (ValueError, RecursionError) as trouble:  # BadValue, and what is no UTF-8 or JSON
            settings.problems.append(_problem(settings, name, str(trouble)))
        else:
            for flag, words in listed.items():
                _take(settings, name, flag, words)


def _words(text: str) -> dict[str, tuple[str, ...]]:
    return {"data_path": tuple(cut(text))}


def _splits(text: str) -> dict[str, tuple[str, ...]]:
    """Under train, valid and test a list of words, or a text of them."""
    content = json.loads(text)
    if not isinstance(content, dict) or not content or set(content) - set(_SPLITS):
        raise BadValue(f"holds no lists under {', '.join(_SPLITS)}")
    return {f"{split}_data_path": _listed(content[split]) for split in _SPLITS if split in content}


def _listed(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, str):
        return tuple(cut(entry))
    if not isinstance(entry, list) or not all(isinstance(word, str | int | float) for word in entry):
        raise BadValue("holds something else than weights and prefixes")
    return tuple(map(str, entry))


def _take(settings: Settings, name: str, flag: str, words: tuple[str, ...]) -> None:
    path = settings.setting(name).value
    if settings.setting(flag).value not in ((), words):
        other = settings.registry.flags[flag].option
        settings.problems.append(_problem(settings, name, f"lists what {other} gives too"))
    else:
        settings.values[flag] = Setting(words, str(path))


def _problem(settings: Settings, name: str, what: str) -> Problem:
    option, setting = settings.registry.flags[name].option, settings.setting(name)
    return Problem(what=f"{option} {setting.value} {what}", given=((option, str(setting.value), setting.origin),))
