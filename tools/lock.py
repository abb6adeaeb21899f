"""Renew requirements/*.lock from pyproject.toml: hashed, without any address in them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"
PROJECT = ["pyproject.toml"]
TOOLS = ["--extra", "embedded-redis", "--extra", "report"]
LOCKS = {
    "runtime.lock": [*PROJECT, *TOOLS],
    "dev.lock": [*PROJECT, *TOOLS, "--group", "dev"],
    "service.lock": PROJECT,
    "build.lock": ["--group", "build"],
}


def main() -> None:
    """Compile each lock for Python 3.11."""
    for name, wanted in LOCKS.items():
        subprocess.run(
            [
                str(UV), "pip", "compile", "--quiet", "--python-version", "3.11",
                "--generate-hashes", "--no-emit-index-url", "--no-emit-find-links",
                "--no-annotate", "--no-header", *wanted,
                "--output-file", str(ROOT / "requirements" / name),
            ],
            cwd=ROOT,
            check=True,
        )  # fmt: skip
        print(f"requirements/{name} is renewed")


if __name__ == "__main__":
    main()
