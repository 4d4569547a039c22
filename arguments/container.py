"""Paths of a run inside a container, whose mounts may rename folders."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os.path import normpath
from pathlib import Path

from arguments.errors import FlagErrors, Problem
from arguments.files import FlagFile, display_path
from arguments.flag import Flag
from arguments.parser import COMMAND_LINE, Given, Settings, split
from arguments.values import DataPrefix, is_number, path_kind, words_of
from megatron_moe.config.checkpoint import HUGGING_FACE


@dataclass(frozen=True)
class Mount:
    """Folder of the host that is mounted in a container."""

    host: Path
    inside: Path
    """Path of the folder in the container."""
    options: str = ""
    """Options of the container runtime, such as `ro`."""

    @classmethod
    def of(cls, text: str) -> "Mount":
        """Parses HOST, HOST:INSIDE or HOST:INSIDE:OPTIONS. Raises FlagErrors if a folder is missing or relative."""
        host, _, rest = text.partition(":")
        inside, _, options = rest.partition(":")
        inside = inside or host
        if not (host.startswith("/") and inside.startswith("/")):
            raise FlagErrors.of(f"--mounts {text!r} is not HOST:INSIDE with absolute folders", "as in --mounts /a:/a")
        return cls(Path(normpath(host)), Path(normpath(inside)), options)

    def __str__(self) -> str:
        return ":".join(filter(None, (str(self.host), str(self.inside), self.options)))


@dataclass(frozen=True)
class ContainerPaths:
    """Translates the paths of a command line from the host, where they are checked, to a container."""

    folder: Path
    """Working directory on the host and in the container."""
    mounts: tuple[Mount, ...]
    notes: dict[str, None] = field(default_factory=dict)
    """Sentences about translated paths, in order and without duplicates."""
    uncovered: dict[Path, str] = field(default_factory=dict)
    """Path that no mount covers -> flag."""
    problems: list[Problem] = field(default_factory=list)

    def path_in_container(self, path: str | Path) -> Path | None:
        """Translates a host path to its path in the container; None if no mount covers it. A path that is already below
        the container folder of a mount is returned unchanged."""
        absolute = Path(normpath(self.folder / path))
        covering = [mount for mount in self.mounts if absolute.is_relative_to(mount.host)]
        if covering:
            mount = max(covering, key=lambda mount: len(mount.host.parts))
            return mount.inside / absolute.relative_to(mount.host)
        return absolute if any(absolute.is_relative_to(mount.inside) for mount in self.mounts) else None

    def command_line(self, words: Sequence[str], settings: Settings, files: Sequence[FlagFile]) -> list[str]:
        """Translates the paths of a command line to the container. Paths on the command line are replaced; paths in
        config files are overridden by additional flags. Raises FlagErrors with all paths that no mount covers or that
        cannot be overridden on the command line.
        """
        result = []
        for given in split(words)[0]:
            values = self._given(given, settings)
            is_joined = bool(values) and values[0].startswith("--")
            result += [f"{given.option}={values[0]}"] if is_joined else [given.option, *values]
        for file in files:
            for given in file.flags:
                found = settings.registry.find(given.option)
                if found and found[0].declaration.repeats:
                    self._rename(given.option, given.origin, given.words or (), self._given(given, settings))
            self._check_bases(file)
        result += self._overrides(settings, files)
        self._refuse()
        return result if self.notes else list(words)

    def _given(self, given: Given, settings: Settings) -> tuple[str, ...]:
        """Words after a flag, with their paths translated to the container."""
        found, words = settings.registry.find(given.option), given.words or ()
        return tuple(self._word(given.option, found[0], word) for word in words) if found else words

    def _overrides(self, settings: Settings, files: Sequence[FlagFile]) -> Iterator[str]:
        """Yields flags that override the flags of config files whose paths differ in the container."""
        lists = [settings.setting(name).value for name in ("data_args_path", "per_split_data_args_path")]
        for name, setting in settings.values.items():
            flag = settings.registry.flags[name]
            is_unused = path_kind(flag.type) is DataPrefix and settings.setting("mock_data").value
            if not path_kind(flag.type) or setting.origin == COMMAND_LINE or flag.declaration.repeats or is_unused:
                continue
            old = words_of(flag.type, setting.value) if setting.value else []
            new = [self._word(flag.option, flag, word) for word in old]
            if new != old and any(setting.origin.startswith(f"{display_path(file.path)}:") for file in files):
                yield from (flag.option, *new)
            elif setting.origin in lists:
                self._rename(flag.option, setting.origin, old, new)

    def _word(self, option: str, flag: Flag, word: str) -> str:
        """Value of a path flag in the container; unchanged if the path is the same there."""
        prefix = HUGGING_FACE if word.startswith(HUGGING_FACE) else ""
        path = word.removeprefix(prefix)
        if not path or not path_kind(flag.type) or (path_kind(flag.type) is DataPrefix and is_number(path)):
            return word
        absolute, inside = Path(normpath(self.folder / path)), self.path_in_container(path)
        if inside is None:
            self.uncovered.setdefault(absolute, option)
        if inside is None or inside == absolute:
            return word
        self.notes[f"{option} {path} is {inside} in the container"] = None
        return f"{prefix}{inside}"

    def _check_bases(self, file: FlagFile) -> None:
        """Records files of `base` that are not mounted in the container, or are mounted under another name than the
        file says."""
        here = self.path_in_container(file.path)
        for base in file.bases:
            path = Path(normpath(self.folder / file.path.parent / base))
            there = self.path_in_container(path)
            if there is None:
                self.uncovered.setdefault(path, f"`base` of {file.path}:")
            elif here is not None and Path(normpath(here.parent / base)) != there:
                self._rename("`base`", str(file.path), [str(base)], [str(there)])

    def _rename(self, what: str, origin: str, old: Sequence[str], new: Sequence[str]) -> None:
        """Records a problem for paths that differ in the container but can be changed only in the file `origin`."""
        pairs = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
        if not pairs:
            return
        names = ", ".join(f"{before}, which is {after} in the container" for before, after in pairs)
        remedy = "mount its folder under its own name, as in --mounts /data:/data"
        self.problems.append(Problem(what=f"{what} in {origin} names {names}", remedy=remedy))

    def _refuse(self) -> None:
        if self.uncovered:
            named = ", ".join(f"{flag} {path}" for path, flag in self.uncovered.items())
            folders = dict.fromkeys(path.parent for path in self.uncovered)
            outer = [each for each in folders if not folders.keys() & set(each.parents)]
            verb = "is" if len(self.uncovered) == 1 else "are"
            what = f"{named} {verb} in no folder that the container mounts"
            remedy = f"add --mounts {' '.join(f'{each}:{each}' for each in outer)}"
            self.problems.append(Problem(what=what, remedy=remedy))
        if self.problems:
            raise FlagErrors(self.problems)
