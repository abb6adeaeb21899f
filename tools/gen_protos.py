"""Generate the Python code of protos/, or check that what is checked in is current.

Usage: gen_protos.py [--check]. With --check nothing is written and the exit code is 1 when a
generated file is missing, stale or left over.
"""

import filecmp
import os
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
WITH_SERVICES = ("agent", "control", "dispatch", "router")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(out: Path) -> None:
    """Write the generated files below `out`.

    Raises:
        SystemExit: protoc refused a file; it has printed why.
    """
    package = PROTOS / "steelyard" / "v1"
    includes = [f"-I{PROTOS}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    messages = [str(path) for path in sorted(package.glob("*.proto"))]
    services = [str(package / f"{name}.proto") for name in WITH_SERVICES]
    for arguments in (
        [f"--python_out={out}", f"--mypy_out=quiet:{out}", *messages],
        [f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet,only_async:{out}", *services],
    ):
        if protoc.main(["protoc", *includes, *arguments]) != 0:
            raise SystemExit(1)


def stale(fresh: Path) -> list[str]:
    """Name the checked-in files that differ from those below `fresh`."""
    there = {p.relative_to(PROTOS) for g in GENERATED for p in PROTOS.rglob(g)}
    here = {p.relative_to(fresh) for g in GENERATED for p in fresh.rglob(g)}
    differing = {
        path for path in there & here if not filecmp.cmp(PROTOS / path, fresh / path, shallow=False)
    }
    return sorted(str(path) for path in (there ^ here) | differing)


def main() -> None:
    """Run the command line."""
    # protoc looks for its plugins on the path; they are beside the Python that runs this.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if sys.argv[1:] == ["--check"]:
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder))
            names = stale(Path(folder))
        if names:
            print("stale, run `make protos`:", *names)
            raise SystemExit(1)
        return
    generate(PROTOS)


if __name__ == "__main__":
    main()
