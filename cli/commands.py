"""The `steelyard` command; each subcommand is imported when it is used."""

from cyclopts import App

app = App(
    name="steelyard",
    help="A calibrated router for disaggregated LLM serving on vLLM.",
    version_flags=["--version"],
)
# Each is imported when it is used, so its line of help stands here.
_COMMANDS = {
    "cli.up:up": "Bring a whole cluster up on this machine, until Ctrl-C.",
    "cli.demo:demo": "Bring a cluster up, send mixed requests through each policy, print a table.",
    "cli.generate:generate": "Generate from one prompt and print the text as it comes.",
    "cli.ctl:ctl": "Look at a cluster and steer it.",
    "calibrator.app:calibrate": "Measure what a token costs on a cluster and publish it.",
    "evaluation.app:evaluate": "Run an experiment, compare policies, write a report.",
    "cli.services:controlplane": "Run a control plane replica.",
    "cli.services:router": "Run a router, with its gateway where one is set.",
    "cli.services:agent": "Run an agent beside one engine.",
}
for _target, _help in _COMMANDS.items():
    app.command(_target, help=_help)
