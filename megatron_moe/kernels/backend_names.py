"""Names of kernel backends, which are those of their files. Loads without torch, so that flags are checked at start."""

from pathlib import Path

BACKENDS = Path(__file__).parent / "backends"
AUTO, REFERENCE = "auto", "reference"


def backend_files(folder: Path) -> dict[str, Path]:
    """Files of the backends in a folder, by name: `<name>.py` or `<name>/backend.py`."""
    found = {path.stem: path for path in folder.glob("*.py") if path.stem != "__init__"}
    return dict(sorted((found | {path.parent.name: path for path in folder.glob("*/backend.py")}).items()))


def requestable() -> tuple[str, ...]:
    """Values of `--kernel-backend`."""
    return (AUTO, REFERENCE, *backend_files(BACKENDS))
