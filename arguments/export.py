"""Settings as a YAML file that reads back as the same settings."""

import re
from collections.abc import Sequence

from arguments.flag import Flag
from arguments.flags import group_classes
from arguments.parser import Settings
from arguments.values import is_list, words_of

_PLAIN = re.compile(r"[A-Za-z0-9_./(+-][A-Za-z0-9_./,+()=-]*")
_NULL_WORDS = ("null", "Null", "NULL", "~", "")
_COMMENT_COLUMN = 56


def yaml_text(settings: Settings, environment: dict[str, str], heading: Sequence[str] = ()) -> str:
    """Every flag by group, each with the origin of its value as a comment."""
    lines = [f"# {line}" for line in heading]
    if environment:
        lines += ["environment:", *(f"  {name}: {_scalar(value)}" for name, value in environment.items())]
    for group in group_classes():
        if group != "start":
            lines += [f"{group}:", *_group_lines(settings, group)]
    return "\n".join(lines) + "\n"


def _group_lines(settings: Settings, group: str) -> list[str]:
    return [_line(settings, flag) for flag in settings.registry.flags.values() if flag.group == group]


def _line(settings: Settings, flag: Flag) -> str:
    setting = settings.setting(flag.name)
    if not settings.known(flag.name):
        return f"  # {flag.option[2:]}: required"
    entry = f"  {flag.option[2:]}: {value_text(flag, setting.value)}"
    return f"{entry:<{_COMMENT_COLUMN}}  # {setting.origin}"


def value_text(flag: Flag, value: object) -> str:
    """A value as it stands in a YAML file."""
    if value is None:
        return "null"
    words = [_scalar(word) for word in words_of(flag.type, value)]
    return f"[{', '.join(words)}]" if is_list(flag.type) else words[0]


def _scalar(word: str) -> str:
    """Plain where that is safe, otherwise in double quotes."""
    if _PLAIN.fullmatch(word) and word not in _NULL_WORDS:
        return word
    return '"' + "".join(map(_character, word.replace("$", "$$"))) + '"'


def _character(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"
