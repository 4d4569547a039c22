"""Writes docs/flags.md and the golden texts of flags and help from the declarations in arguments/groups/, and what
flags can do today into the guide docs/optimize.md.

python tools/write_flags_doc.py
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script, from any folder

from arguments.explain import answer, document, surface  # noqa: E402
from arguments.flags import Registry  # noqa: E402
from tools.status_in_guides import refreshed  # noqa: E402


def main() -> None:
    """Writes all four files."""
    registry = Registry.declared()
    guide = ROOT / "docs" / "optimize.md"
    for path, text in (
        (guide, refreshed(guide.read_text(encoding="utf-8"), registry)),
        (ROOT / "docs" / "flags.md", document(registry)),
        (ROOT / "tests" / "goldens" / "flags.txt", surface(registry)),
        (ROOT / "tests" / "goldens" / "help.txt", f"{answer(['--help'], registry)}\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes nothing but --help
    main()
