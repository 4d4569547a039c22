"""Stand-ins for SLURM's programs: `srun` starts local tasks, the others log their arguments."""

import os
import stat
from pathlib import Path

SRUN = """#!/usr/bin/env bash
# srun: starts as many copies as --ntasks says, or as the allocation has; the largest exit code is its own
echo "srun $*" >>"$STUB_LOG"
tasks=$STUB_TASKS
while [ "${1:0:2}" = -- ]; do
    case $1 in --ntasks=*) tasks=${1#*=} ;; esac
    shift
done
pids=()
for ((rank = 0; rank < tasks; rank++)); do
    SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 SLURM_NTASKS=$tasks \\
        SLURM_STEP_NUM_TASKS=$tasks SLURM_STEP_TASKS_PER_NODE=$tasks SLURM_STEP_NODELIST=localhost "$@" &
    pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do
    wait "$pid" || { code=$?; [ "$code" -le "$worst" ] || worst=$code; }
done
exit "$worst"
"""
RECORDER = """#!/usr/bin/env bash
echo "${0##*/} $*" >>"$STUB_LOG"
"""
PROGRAM = """#!/usr/bin/env bash
# python: the training program ends as STUB_CODE says, after writing STUB_STATUS; any other program really runs
echo "python $*" >>"$STUB_LOG"
[ -z "${STUB_SITE:-}" ] || echo "STUB_SITE=$STUB_SITE" >>"$STUB_LOG"
for word in "$@"; do
    case $word in
        */pretrain_moe.py)
            [ -z "${STUB_STATUS:-}" ] || cp "$STUB_STATUS" "$STUB_RUN_DIR/status.json"
            [ "${STUB_SIGNAL:-}" != pretrain ] || kill -TERM "$STUB_SIGNAL_TO"
            exit "${STUB_CODE:-0}"
            ;;
        */requeue.py) [ "${STUB_SIGNAL:-}" != requeue ] || kill -TERM "$STUB_SIGNAL_TO" ;;
    esac
done
exec "$STUB_PYTHON" "$@"
"""


def write_stubs(folder: Path, *, tasks: int = 1) -> dict[str, str]:
    """Writes the stand-ins to a folder; returns an environment whose PATH starts with it."""
    for name, text in (("srun", SRUN), ("sbatch", RECORDER), ("scontrol", RECORDER), ("stub_python", PROGRAM)):
        path = folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "STUB_LOG": str(folder / "log"),
        "STUB_TASKS": str(tasks),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "localhost",
    }


def logged_commands(folder: Path) -> list[str]:
    """Logged command lines, in order."""
    log = folder / "log"
    return log.read_text().splitlines() if log.exists() else []
