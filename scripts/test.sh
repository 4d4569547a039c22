#!/usr/bin/env bash
# Installs what the tests need and passes them all: lint, types, then tests from the quickest to the slowest.
#   bash scripts/test.sh                 everything, into the active virtual environment or into .venv
#   INSTALL=no bash scripts/test.sh      without installing
#   PYTHON=python3.12 bash scripts/test.sh
# The stages stop at the first that fails. The last line sums all tests of all stages, and their seconds.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 3
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

if [ -z "${VIRTUAL_ENV:-}" ]; then
    [ -d .venv ] || "${PYTHON:-python3}" -m venv .venv || exit 3
    # shellcheck disable=SC1091
    source .venv/bin/activate
fi

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
failed=""

stage() { # stage NAME COMMAND...: runs it unless an earlier stage failed
    local name=$1
    shift
    [ -z "$failed" ] || return 0
    printf '\n=== %s ===\n' "$name"
    "$@" || failed=$name
}

beside() { # beside NAME COMMAND...: starts it beside the next stage, unless an earlier one failed; `join` ends it
    [ -z "$failed" ] || return 0
    other=$1
    "${@:2}" >"$reports/other.log" 2>&1 &
    process=$!
}

join() { # shows what the stage beside has said, and learns how it ended
    [ -n "${process:-}" ] || return 0
    wait "$process" || failed=${failed:+$failed, }$other
    process=""
    printf '\n=== %s ===\n' "$other"
    cat "$reports/other.log"
}

tests() { # tests REPORT ARGUMENTS...: one pytest session whose counts go into the last line
    python -m pytest -q --durations=10 --junitxml="$reports/$1.xml" "${@:2}"
}

existing() { # existing PATH...: those that are there
    for path in "$@"; do
        [ ! -e "$path" ] || printf '%s ' "$path"
    done
}

quick=$(existing tests/house_rules tests/arguments tests/config tests/helpers/test_tolerances.py)
slow=$(existing tests/parity tests/end_to_end tests/faults tests/kernels)

[ "${INSTALL:-yes}" = no ] || stage "install" bash scripts/install.sh test
stage "lint" python -m ruff check .
# stages run two by two, since each keeps about one core busy
beside "types" python -m mypy
# shellcheck disable=SC2086
stage "rules, flags and plain Python" tests quick $quick
join
# shellcheck disable=SC2086
[ -z "$slow" ] || beside "parity, whole runs and kernels" tests slow $slow
# shellcheck disable=SC2046,SC2086
stage "one process and threads" tests rooms tests $(printf -- '--ignore=%s ' $quick $slow)
join

[ -z "$failed" ] || printf '\nstage "%s" failed\n' "$failed"
python - "$reports" "$failed" <<'PYTHON'
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

suites = [suite for path in Path(sys.argv[1]).glob("*.xml") for suite in xml.parse(path).getroot().iter("testsuite")]
total = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")}
seconds = sum(float(suite.get("time", 0)) for suite in suites)
passed = total["tests"] - total["failures"] - total["errors"] - total["skipped"]
counts = {"failed": total["failures"], "passed": passed, "skipped": total["skipped"], "errors": total["errors"]}
text = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "passed")
print(f"===== {text} in {seconds:.2f}s =====")
sys.exit(1 if sys.argv[2] or total["failures"] or total["errors"] or not passed else 0)
PYTHON
