"""The `steelyard` command; each subcommand is imported when it is used."""

from cyclopts import App

app = App(
    name="steelyard",
    help="A calibrated router for disaggregated LLM serving on vLLM.",
    version_flags=["--version"],
)
# Each is imported when it is used, so its line of help stands here.
_COMMANDS = {
    "up": ("cli.up:up", "Bring a whole cluster up on this machine, until Ctrl-C."),
    "demo": (
        "cli.demo:demo",
        "Bring a cluster up, send mixed requests through each policy, print a table.",
    ),
    "generate": (
        "cli.generate:generate",
        "Generate from one prompt and print the text as it comes.",
    ),
    "ctl": ("cli.ctl:ctl", "Look at a cluster and steer it."),
    "calibrate": (
        "calibrator.app:calibrate",
        "Measure what a token costs on a cluster and publish it.",
    ),
    "evaluate": (
        "evaluation.app:app",
        "Run an experiment, compare policies, write a report.",
    ),
    "controlplane": ("cli.services:controlplane", "Run a control plane replica."),
    "router": ("cli.services:router", "Run a router, with its gateway where one is set."),
    "agent": ("cli.services:agent", "Run an agent beside one engine."),
}
for _name, (_target, _help) in _COMMANDS.items():
    app.command(_target, name=_name, help=_help)
