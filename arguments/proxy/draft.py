"""Settings that are being rewritten, and a line about every rewrite."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arguments.parser import Setting, Settings
from arguments.values import words_of

PROXY = "proxy"
"""Origin of a rewritten value."""


class Draft:
    """A copy of settings in which values can be replaced, but for those that were asked for behind `--proxy`."""

    def __init__(self, settings: Settings, pinned: Mapping[str, Setting]) -> None:
        self.settings = replace(settings, values=dict(settings.values))
        self.pinned = pinned
        self.notes: list[str] = []

    def value(self, name: str) -> Any:
        """The value in force."""
        return self.settings.setting(name).value

    def put(self, name: str, value: object, reason: str) -> None:
        """Replaces a value, unless it is pinned or the same."""
        old = self.settings.setting(name)
        if name in self.pinned or old.value == value:
            return
        self.settings.values[name] = Setting(value, PROXY)
        self.notes.append(
            f"proxy: {self.settings.registry.flags[name].option} {self._shown(name, old.value)} -> "
            f"{self._shown(name, value)} ({reason})"
        )

    def lower(self, name: str, most: int, reason: str) -> None:
        """Replaces a number that is set and larger than `most`."""
        if self.value(name) is not None and self.value(name) > most:
            self.put(name, most, reason)

    def default(self, name: str, reason: str) -> None:
        """Replaces a value by the flag's default."""
        self.put(name, self.settings.registry.flags[name].default, reason)

    def take_pinned(self) -> None:
        """From here on the pinned values are in force."""
        self.settings.values |= self.pinned

    def _shown(self, name: str, value: object) -> str:
        flag = self.settings.registry.flags[name]
        if flag.is_switch:
            return "on" if value else "off"
        return "not set" if value is None or value == () else " ".join(words_of(flag.type, value))
