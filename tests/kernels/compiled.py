"""Compiles kernels for a Hopper GPU on a machine without one, in a subprocess without the interpreter."""

import json
import os
import subprocess
import sys
from typing import Any

SHARED_MEMORY = 232_448
"""Bytes that one program can have on an H100 or H200."""
NO_SPILLS = "0 bytes spill stores, 0 bytes spill loads"
"""Line that ptxas prints for a kernel without register spills."""

_BEFORE = """
import json, subprocess, tempfile, torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=0): return 0

triton.runtime.driver.set_active(Driver())
found = []

class Compiled:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        def compile(*given, **constants):
            code = self.kernel.warmup(*given, grid=grid, **constants)
            with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
                file.write(code.asm["ptx"]); file.flush()
                words = [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
                said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
            found.append(dict(shared=code.metadata.shared, ptxas=said, ptx=code.asm["ptx"], ttgir=code.asm["ttgir"]))
        return compile
"""


def compiled(launches: str) -> list[dict[str, Any]]:
    """Results of compiling every launch: "shared" (bytes of shared memory), "ptxas" (its output), "ptx" and "ttgir"
    (the code).

    `launches`: Python code that replaces kernels by `Compiled(kernel)` and calls their wrappers.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", f"{_BEFORE}\n{launches}\nprint(json.dumps(found))"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
