"""One planted bug: a small change of one file, and the tests that must notice it."""

from dataclasses import dataclass
from pathlib import Path


class DoesNotApply(Exception):
    """The text to be changed does not stand exactly once in its file: the bug must be written anew."""


@dataclass(frozen=True, kw_only=True)
class Bug:
    """Data alone; `run.py` plants it."""

    name: str
    """What is wrong, in a few words."""
    file: str
    old: str
    """Stands exactly once in the file."""
    new: str
    select: tuple[str, ...]
    """Arguments of pytest: the shortest selection of tests that must turn red."""
    reason: str
    """What such a mistake does to a run, or where it has been made before."""

    def planted(self, text: str) -> str:
        """The text of the file with the bug in it. Raises DoesNotApply."""
        count = text.count(self.old)
        if count != 1:
            raise DoesNotApply(f"{self.name}: {self.file} has the text {count} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)

    def plant(self, root: Path) -> str:
        """Writes the bug into the tree at `root`; returns the text as it was."""
        path = root / self.file
        text = path.read_text()
        path.write_text(self.planted(text))
        return text
