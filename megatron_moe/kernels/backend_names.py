"""Names of kernel backends, derived from their file names. Loads without torch, so that flags can be checked before
torch is imported."""

from pathlib import Path

BACKENDS = Path(__file__).parent / "backends"
AUTO, REFERENCE = "auto", "reference"


def backend_files(folder: Path) -> dict[str, Path]:
    """Files of the backends in a folder, by name: `<name>.py` or `<name>/backend.py`."""
    found = {path.stem: path for path in folder.glob("*.py") if path.stem != "__init__"}
    return dict(sorted((found | {path.parent.name: path for path in folder.glob("*/backend.py")}).items()))


def requestable() -> tuple[str, ...]:
    """Returns the values that `--kernel-backend` accepts."""
    return (AUTO, REFERENCE, *backend_files(BACKENDS))
