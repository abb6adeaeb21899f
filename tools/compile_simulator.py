"""Make a copy of the product in out/compiled/ in which what simulations spend their time in is compiled.

Usage: compile_simulator.py. It takes some minutes of one core and needs a C compiler. Plain Python
gives the same digits, several times as slowly; `COMPILED=1 tools/simulate.sh` runs the copy. The copy
is of the files as they are now: make it anew after a change.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "compiled"
COPIED = (
    "calibrator", "cli", "controlplane", "dataplane", "enginemodel", "evaluation", "localcluster",
    "servicekit", "simulator",
)  # fmt: skip
HOT = ("enginemodel/model.py", "simulator/*.py", "dataplane/core/**/*.py")
# Values that others subclass, decode or compare, and what a simulation seldom or never runs.
LEFT_AS_THEY_ARE = (
    "__init__.py",
    "simulator/app.py",
    "simulator/cluster.py",
    "simulator/errors.py",
    "simulator/values.py",
    "dataplane/core/delegation.py",
    "dataplane/core/emulation/",
    "dataplane/core/errors.py",
    "dataplane/core/estimate.py",
    "dataplane/core/handoff.py",
    "dataplane/core/lengths.py",
    "dataplane/core/recording.py",
)
SHOWN = ("simulator.decode", "enginemodel.model", "dataplane.core.pool")
CHECK = """
import importlib, sys
for name in sys.argv[1:]:
    path = importlib.import_module(name).__file__
    print(name, path)
    if not path.endswith(".so"):
        raise SystemExit(f"{name} is not compiled")
"""


def hot_modules(folder: Path) -> Iterator[str]:
    """Yield the paths of the modules to compile, relative to the folder."""
    for pattern in HOT:
        for path in sorted(folder.glob(pattern)):
            name = path.relative_to(folder).as_posix()
            if path.name not in LEFT_AS_THEY_ARE and not name.startswith(LEFT_AS_THEY_ARE):
                yield name


def main() -> None:
    """Copy, compile in place, see that the compiled modules are found."""
    building = OUT.with_name("compiling")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    # Says what the copy is of: tools/simulate.sh makes it anew where a source is younger.
    (building / "built").touch()
    for package in COPIED:
        shutil.copytree(
            ROOT / package, building / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    environment = os.environ | {
        "MYPYPATH": str(building),
        "MYPYC_OPT_LEVEL": "2",
        "MYPYC_DEBUG_LEVEL": "0",
    }
    # No config file: the project's names what mypy checks, which is more than what is compiled.
    compiler = [sys.executable, "-m", "mypyc", "--config-file=", "--ignore-missing-imports"]
    log = OUT.with_name("compile.log")
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [*compiler, *hot_modules(building)],
            cwd=building, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        lines = [line for line in log.read_text("utf-8").splitlines() if "error" in line]
        print("mypyc failed, see", log, *lines[:10], sep="\n")
        raise SystemExit(1)
    shutil.rmtree(building / "build")
    shutil.rmtree(OUT, ignore_errors=True)
    building.rename(OUT)
    subprocess.run(
        [sys.executable, "-c", CHECK, *SHOWN],
        cwd=OUT, env=os.environ | {"PYTHONPATH": str(OUT)}, check=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
