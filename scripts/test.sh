#!/usr/bin/env bash
# Installs the test dependencies and runs everything that CI runs: lint, types, and tests in three processes.
#   bash scripts/test.sh                 everything, into the active virtual environment or into .venv
#   INSTALL=no bash scripts/test.sh      without installing
#   PYTHON=python3.12 bash scripts/test.sh
# Runs no tests if lint fails. The last line has the counts and seconds of all tests.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 3
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE # tests start many programs with the same modules

if [ -z "${VIRTUAL_ENV:-}" ]; then
    [ -d .venv ] || "${PYTHON:-python3}" -m venv .venv || exit 3
    # shellcheck disable=SC1091
    source .venv/bin/activate
fi

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT

stage() { # stage NAME COMMAND...: runs it and notes its name in `failed` if it fails
    printf '\n=== %s ===\n' "$1"
    "${@:2}" || echo "$1" >>"$reports/failed"
}

ok() { # succeeds unless a stage has failed
    [ ! -e "$reports/failed" ]
}

[ "${INSTALL:-yes}" = no ] || stage "install" bash scripts/install.sh test --no-compile
! ok || stage "lint" python -m ruff check .
if ok; then
    stage "types" python -m mypy >"$reports/types.log" 2>&1 &
    # Three workers on two cores, because some tests wait for processes.
    stage "tests" python -m pytest -p tests.helpers.forked_workers --workers 3 -q --durations=40 \
        --junitxml="$reports/tests.xml" tests
    wait
    cat "$reports/types.log"
fi

failed=$(paste -sd, "$reports/failed" 2>/dev/null)
[ -z "$failed" ] || printf '\nstage "%s" failed\n' "$failed"
python - "$reports" "$failed" <<'PYTHON'
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

report = Path(sys.argv[1]) / "tests.xml"
suites = list(xml.parse(report).getroot().iter("testsuite")) if report.exists() else []
total = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")}
seconds = sum(float(suite.get("time", 0)) for suite in suites)
passed = total["tests"] - total["failures"] - total["errors"] - total["skipped"]
counts = {"failed": total["failures"], "passed": passed, "skipped": total["skipped"], "errors": total["errors"]}
text = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "passed")
print(f"===== {text} in {seconds:.2f}s =====")
sys.exit(1 if sys.argv[2] or total["failures"] or total["errors"] or not passed else 0)
PYTHON
