"""Evaluates JavaScript in a page that Chromium (QtWebEngine, the extra "browser") shows without a display.

python -m tests.helpers.browser PAGE WIDTH EXPRESSION     prints the value of the expression as JSON
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

INSTALL = "bash scripts/install.sh test,browser"
_SETTINGS = {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"}  # the sandbox refuses to run as root
_HEIGHT = 900


def evaluate(page: Path, width: int, expression: str) -> Any:
    """Value of a JavaScript expression once the page is loaded in a window of `width` pixels.

    The page is shown by a separate process, because Qt would otherwise stay loaded in the test process.
    """
    assert find_spec("PyQt6"), f"no browser is installed; run: {INSTALL}"
    command = [sys.executable, "-m", "tests.helpers.browser", str(page), str(width), expression]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **_SETTINGS})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def main() -> int:
    from PyQt6.QtCore import QUrl
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    page, width, expression = sys.argv[1:]
    application, view = QApplication(sys.argv[:1]), QWebEngineView()
    view.resize(int(width), _HEIGHT)
    view.show()

    def answer(value: Any) -> None:
        print(json.dumps(value))
        application.quit()

    def loaded(succeeded: bool) -> None:
        assert succeeded, f"{page} cannot be shown"
        view.page().runJavaScript(expression, answer)

    view.loadFinished.connect(loaded)
    view.load(QUrl.fromLocalFile(page))
    return application.exec()


if __name__ == "__main__":
    sys.exit(main())
