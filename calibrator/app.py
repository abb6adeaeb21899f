"""`steelyard calibrate`: constructs a campaign, shows it, publishes what it finds."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from calibrator.agents import open_clients
from calibrator.campaign import Campaign, Findings, Plan
from calibrator.cluster import ready_targets
from calibrator.control import ControlClient
from calibrator.display import Display
from calibrator.errors import CalibrationError, PublicationRefused
from calibrator.profile import ProfileFit
from calibrator.publication import publish_all
from calibrator.publish import Rules
from calibrator.report import write_report
from calibrator.result import CalibrationResult, as_json
from servicekit.channel import open_channel
from servicekit.clock import Clock, SystemClock
from servicekit.signals import stop_on_signals

SloForm = Literal["measured", "scaled", "keep"]
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where to calibrate and what to do with the result."""

    control_plane: str
    plan: Plan
    json_path: Path | None = None
    report_directory: Path | None = None
    force: bool = False
    slo: SloForm = "measured"


class Calibration:
    """One run of the command.

    Args:
        options: What was asked for.
        display: Shows progress.
        clock: Keeps the budget.
    """

    def __init__(self, options: Options, display: Display, clock: Clock) -> None:
        self._options = options
        self._display = display
        self._clock = clock
        self._began = clock.monotonic()
        self._began_unix = clock.unix()

    async def run(self) -> CalibrationResult:
        """Calibrate and publish; the result is written to files in every case.

        Raises:
            CalibrationError: Nothing was published; the message says why.
        """
        findings = Findings()
        try:
            async with AsyncExitStack() as stack:
                versions = await self._calibrate(stack, findings)
        except CalibrationError as error:
            self._write(self._result(findings, type(error).__name__, str(error)), findings)
            raise
        named = ", ".join(f"{name} version {version}" for name, version in versions.items())
        findings.profiles = [replace(p, version=versions[p.profile]) for p in findings.profiles]
        result = self._result(findings, "published", f"published {named}")
        self._write(result, findings)
        return result

    async def _calibrate(self, stack: AsyncExitStack, findings: Findings) -> dict[str, int]:
        """Hold the lock, measure, publish."""
        options = self._options
        channel = await stack.enter_async_context(open_channel(options.control_plane))
        control = ControlClient(options.control_plane, channel)
        await stack.enter_async_context(control.lock(f"{socket.gethostname()}:{os.getpid()}"))
        ready = ready_targets((await control.roster()).instances)
        clients = open_clients(ready, self._clock, stack)
        self._display.begin(ready, options.plan)
        campaign = Campaign(
            options.plan,
            clients,
            control,
            findings,
            clock=self._clock,
            compute=_in_thread,
            progress=self._display.fitted,
        )
        await campaign.run(ready, announce=self._display.announce)
        self._refuse(findings)
        slo = {} if options.slo == "keep" else findings.slo
        return await publish_all(
            control, findings.drafts, slo, length_scaled=options.slo == "scaled"
        )

    def _refuse(self, findings: Findings) -> None:
        """Stop unless every profile may be published, or the operator insists."""
        reasons = [
            f"{profile.profile}: {refusal.message}"
            for profile in findings.profiles
            for refusal in profile.refusals
        ]
        if reasons and not self._options.force:
            raise PublicationRefused(
                "refused to publish: " + "; ".join(reasons) + " (--force publishes all the same)"
            )

    def _result(self, findings: Findings, outcome: str, message: str) -> CalibrationResult:
        return CalibrationResult(
            outcome=outcome,
            message=message,
            seed=self._options.plan.seed,
            budget_seconds=self._options.plan.budget_seconds,
            elapsed_seconds=self._clock.monotonic() - self._began,
            started_unix_seconds=self._began_unix,
            gates=findings.gates,
            profiles=findings.profiles,
            slo=findings.slo,
            round_trip_seconds=findings.round_trips,
        )

    def _write(self, result: CalibrationResult, findings: Findings) -> None:
        """Write the JSON and the report that were asked for."""
        options = self._options
        if options.json_path is not None:
            options.json_path.parent.mkdir(parents=True, exist_ok=True)
            options.json_path.write_text(json.dumps(as_json(result), indent=2) + "\n")
        if options.report_directory is not None:
            seen = {sweep.targets.profile: sweep.seen for sweep in findings.sweeps}
            kv = {s.targets.profile: s.targets.kv_bytes_per_token for s in findings.sweeps}
            write_report(options.report_directory, result, seen, kv)


async def _in_thread(work: Callable[[], ProfileFit]) -> ProfileFit:
    """Fit beside the loop, so that probes go on."""
    return await asyncio.to_thread(work)


async def run(options: Options, console: Console) -> CalibrationResult:
    """Calibrate until done or until SIGINT or SIGTERM.

    Raises:
        CalibrationError: Nothing was published.
        asyncio.CancelledError: A signal came; the engines are free again.
    """
    stop = asyncio.Event()
    with stop_on_signals(stop), Display(console) as display:
        work = asyncio.create_task(Calibration(options, display, SystemClock()).run())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            work.cancel()
        return await work


def calibrate(
    *,
    control_plane: Annotated[
        str, Parameter(env_var="STEELYARD_CONTROL_PLANE", help="host:port of a control plane.")
    ] = "127.0.0.1:7420",
    budget: Annotated[float, Parameter(help="Seconds for everything.")] = 300.0,
    json_file: Annotated[
        Path | None, Parameter(name="--json", help="Write the result here.")
    ] = None,
    report: Annotated[Path | None, Parameter(help="Write a report into this directory.")] = None,
    force: Annotated[bool, Parameter(help="Publish in spite of refusals.")] = False,
    accept_jump: Annotated[
        bool, Parameter(help="Accept constants three times away from the last version.")
    ] = False,
    slo: Annotated[
        SloForm,
        Parameter(help="Targets from light load, with a TTFT that grows with the prompt, or kept."),
    ] = "measured",
    tight_factor: Annotated[float, Parameter(help="Tight targets over light load.")] = 3.0,
    loose_factor: Annotated[float, Parameter(help="Loose targets over tight ones.")] = 3.0,
    max_error: Annotated[float, Parameter(help="Largest held-out median error, a share.")] = 0.15,
    parallel: Annotated[int, Parameter(help="Probes at once over the cluster.")] = 8,
    handoff_pairs: Annotated[int, Parameter(help="Pairs that hand-offs are measured on.")] = 8,
    seed: Annotated[int, Parameter(help="Of order, lengths and prompts.")] = 0,
) -> None:
    """Measure what tokens cost on this cluster, and publish it.

    Exit codes: 0 published, 1 failed, 3 no READY instance, 4 a gate failed, 5 refused to publish,
    6 control plane or Redis away, 7 another calibration runs, 8 the last instance of a kind died,
    130 interrupted.
    """
    if budget <= 0 or parallel < 1 or tight_factor <= 1 or loose_factor < 1:
        sys.exit(
            "steelyard: --budget > 0, --parallel >= 1, --tight-factor > 1, --loose-factor >= 1"
        )
    plan = Plan(
        budget_seconds=budget,
        seed=seed,
        parallel=parallel,
        handoff_pairs=handoff_pairs,
        rules=Rules(max_heldout_error=max_error, accept_jump=accept_jump),
        tight_factor=tight_factor,
        loose_factor=loose_factor,
        reason="steelyard calibrate" + (" --force" if force else ""),
    )
    options = Options(
        control_plane=control_plane,
        plan=plan,
        json_path=json_file,
        report_directory=report,
        force=force,
        slo=slo,
    )
    sys.exit(_report(options))


def _report(options: Options) -> int:
    """Run a calibration, say what came of it, and return the exit code."""
    console = Console(stderr=True)
    try:
        result = asyncio.run(run(options, console))
    except CalibrationError as error:
        console.print(f"steelyard: {error}", markup=False, soft_wrap=True)
        return error.exit_code
    except asyncio.CancelledError:
        console.print("steelyard: interrupted; nothing was published", markup=False)
        return _INTERRUPTED
    console.print(result.message, markup=False, soft_wrap=True)
    return 0
