"""The `steelyard` command; each subcommand is imported when it is used."""

import sys

from cyclopts import App

from cli.output import fail

app = App(
    name="steelyard",
    help="A calibrated router for disaggregated LLM serving on vLLM.",
    version_flags=["--version"],
)
app.command("cli.services:controlplane")
app.command("cli.services:router")
app.command("cli.services:agent")
app.command("cli.up:up")
app.command("cli.demo:demo")
app.command("cli.generate:generate")
app.command("cli.ctl:ctl", name="ctl")
app.command("calibrator.app:calibrate")
app.command("evaluation.app:evaluate")


def main() -> None:
    """Run the command line; known errors are one line on stderr and exit code 1."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # noqa: BLE001  the last one to see it
        fail(error)


if __name__ == "__main__":
    main()
