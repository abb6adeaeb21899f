"""Where the `steelyard` command begins: imports all else where Ctrl-C and errors are minded."""

import sys


def main() -> None:
    """Run the command line; known errors are one line on stderr and exit code 1."""
    try:
        from cli.commands import app  # noqa: PLC0415  takes a while

        app(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # noqa: BLE001  the last one to see it
        from cli.output import fail  # noqa: PLC0415

        fail(error)


if __name__ == "__main__":
    main()
