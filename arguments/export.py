"""Formats settings as YAML, JSON or a command line. Reading the text back gives the same settings."""

import json
import shlex
import textwrap
from collections.abc import Sequence

from arguments.flag import Flag
from arguments.flags import groups
from arguments.parser import Settings
from arguments.values import is_list, words_of, yaml_scalar

_COMMENT_COLUMN = 56


def export(settings: Settings, environment: dict[str, str], fmt: str) -> str:
    """Output of `--print-config`. `fmt`: `yaml` and `json` print all flags, `flags` only the flags that were given."""
    if fmt == "flags":
        return flags_text(settings)
    return json_text(settings, environment) if fmt == "json" else yaml_text(settings, environment)


def yaml_text(settings: Settings, environment: dict[str, str], heading: Sequence[str] = ()) -> str:
    """YAML text of all flags by group; comments state the origins of values. `heading`: comment lines at the top."""
    lines = [f"# {line}" for line in heading]
    if environment:
        lines += ["environment:", *(f"  {name}: {yaml_scalar(value)}" for name, value in environment.items())]
    for group, flags in _groups(settings).items():
        lines += [f"{group}:", *(_line(settings, flag) for flag in flags)]
    return "\n".join(lines) + "\n"


def json_text(settings: Settings, environment: dict[str, str]) -> str:
    """JSON text of all flags by group, which is also valid YAML, so that `--config` can read it."""
    variables = [f"{_string(name)}: {_string(value)}" for name, value in environment.items()]
    entries = [f'"environment": {_object(variables)}']
    for group, flags in _groups(settings).items():
        known = [flag for flag in flags if settings.known(flag.name)]
        lines = [f"{_string(flag.option[2:])}: {_json(flag, settings.setting(flag.name).value)}" for flag in known]
        entries.append(f'"{group}": {_object(lines)}')
    return _object(entries) + "\n"


def flags_text(settings: Settings) -> str:
    """Command line of the given flags, quoted for a shell, with one flag per line."""
    given = [flag for flags in _groups(settings).values() for flag in flags if flag.name in settings.values]
    lines = [" ".join(map(shlex.quote, words_to_set(flag, settings.setting(flag.name).value))) for flag in given]
    return " \\\n".join(line for line in lines if line) + "\n"


def words_to_set(flag: Flag, value: object) -> list[str]:
    """Command-line words that set a flag to `value`; an empty list for None."""
    if value is None:
        return []
    if flag.is_switch:
        return [flag.option if value else flag.off_options[0]]
    words = [f'"{word}"' if word.startswith("--") else word for word in words_of(flag.type, value)]
    return [f"{flag.option}={words[0]}"] if words == [""] else [flag.option, *words]


def _groups(settings: Settings) -> dict[str, list[Flag]]:
    """Group -> its flags, for the groups whose flags are allowed in files."""
    found: dict[str, list[Flag]] = {group: [] for group in groups()}
    for flag in settings.registry.flags.values():
        if flag.group in found:
            found[flag.group].append(flag)
    del found["start"]
    return found


def _line(settings: Settings, flag: Flag) -> str:
    if not settings.known(flag.name):
        return f"  # {flag.option[2:]}: required"
    setting = settings.values.get(flag.name)
    text, origin = (flag.default_yaml, "default") if setting is None else (flag.yaml(setting.value), setting.origin)
    entry = f"  {flag.option[2:]}: {text}"
    return f"{entry:<{_COMMENT_COLUMN}}  # {origin}"


def _object(entries: Sequence[str]) -> str:
    return "{\n" + ",\n".join(textwrap.indent(entry, "  ") for entry in entries) + "\n}" if entries else "{}"


def _json(flag: Flag, value: object) -> str:
    if isinstance(value, tuple) and is_list(flag.type):
        items = zip(value, words_of(flag.type, value), strict=True)
        return f"[{', '.join(_json_item(item, word) for item, word in items)}]"
    return "null" if value is None else _json_item(value, words_of(flag.type, value)[0])


def _json_item(value: object, word: str) -> str:
    return json.dumps(value) if isinstance(value, bool | int | float) else _string(word)


def _string(text: str) -> str:
    """JSON string that YAML reads too. Printable characters are kept, since YAML cannot join escaped surrogates."""
    parts = (json.dumps(part, ensure_ascii=not part.isprintable())[1:-1] for part in text.replace("$", "$$"))
    return f'"{"".join(parts)}"'
