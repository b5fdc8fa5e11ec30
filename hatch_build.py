"""Puts the compiled library into the wheel: one file for each kind of processor that the compiler's machine has.

Off unless HATCH_BUILD_HOOK_ENABLE_CUSTOM=true, so that `pip install .` makes a wheel for any machine, which compiles at
first use. $CXX names the compiler; a cross compiler makes the wheel of its machine. `make wheel` is the way to call it.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGED = "draftproof/runtime/prebuilt"


class PrebuiltLibraries(BuildHookInterface[Any]):
    """The hook; hatchling makes one for each wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        # by its path: importing the package would ask for torch
        compiling = runpy.run_path(str(Path(self.root) / "src/draftproof/runtime/compiling.py"))
        compiler = os.environ.get("CXX") or compiling["find_compiler"]()
        if not compiler:
            raise RuntimeError("no C++ compiler on the path; install g++, or name one: CXX=/path/to/c++")
        asked = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True, check=True)
        machine = asked.stdout.partition("-")[0]
        if machine not in compiling["VARIANTS"]:
            raise RuntimeError(
                f"{compiler} compiles for {machine}, of which no variant is known; leave the hook off"
            )
        for variant in compiling["VARIANTS"][machine]:
            folder = Path(self.root) / "build" / "prebuilt" / variant.name
            folder.mkdir(parents=True, exist_ok=True)
            start = time.monotonic()
            built = compiling["compile_library"](
                compiler, variant.flags, folder, link=compiling["PORTABLE_LINK"]
            )
            seconds = time.monotonic() - start
            print(f"{variant.name}: {seconds:.1f} s, {built.stat().st_size >> 10} KiB", file=sys.stderr)
            build_data["force_include"][str(built)] = f"{PACKAGED}/{variant.name}.so"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"
