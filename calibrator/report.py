"""The report of a calibration: `report.html`, `report.md` and the pictures that both show."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from jinja2 import Environment, PackageLoader, select_autoescape

from calibrator.profile import CONSTANT_NAMES, Observations
from calibrator.result import CalibrationResult, ProfileResult

Rows = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class ProfileSection:
    """What the report says of one profile."""

    title: str
    fingerprint: str
    constants: Rows
    heldout: Rows
    instances: Rows
    refusals: list[str]
    pictures: list[tuple[str, str]]


def write_report(
    directory: Path,
    result: CalibrationResult,
    seen: Mapping[str, Observations],
    kv_bytes_per_token: Mapping[str, int],
) -> None:
    """Write the report of a result; earlier files of the same names are replaced.

    Args:
        directory: Made where it is missing.
        result: What came out.
        seen: Observations by profile.
        kv_bytes_per_token: By profile.
    """
    from calibrator.figures import draw  # noqa: PLC0415  matplotlib is an extra, and slow to import

    directory.mkdir(parents=True, exist_ok=True)
    sections = []
    for profile in result.profiles:
        stem = re.sub(r"[^A-Za-z0-9.-]+", "_", profile.profile) or "profile"
        pictures = draw(
            directory,
            stem,
            profile.found,
            seen[profile.profile],
            kv_bytes_per_token[profile.profile],
        )
        sections.append(_section(profile, pictures))
    (directory / "report.html").write_text(_html(result, sections), encoding="utf-8")
    (directory / "report.md").write_text(_markdown(result, sections), encoding="utf-8")


def _html(result: CalibrationResult, sections: Sequence[ProfileSection]) -> str:
    environment = Environment(
        loader=PackageLoader("calibrator"), autoescape=select_autoescape(default=True)
    )
    return environment.get_template("report.html.j2").render(
        result=result,
        began=_when(result.started_unix_seconds),
        gates=_gates(result),
        profiles=sections,
        slo=_slo(result),
        table=_html_table,
    )


def _markdown(result: CalibrationResult, sections: Sequence[ProfileSection]) -> str:
    lines = [
        "# Calibration",
        "",
        result.message,
        "",
        (
            f"{result.elapsed_seconds:.0f} s of {result.budget_seconds:.0f} s, seed {result.seed}, "
            f"begun {_when(result.started_unix_seconds)}."
        ),
        "",
        "## Gates",
        "",
        _markdown_table(_gates(result)),
    ]
    for section in sections:
        lines += ["", f"## {section.title}", "", f"`{section.fingerprint}`", ""]
        lines += [_markdown_table(section.constants), "", "Error on held-out points:", ""]
        lines += [_markdown_table(section.heldout), "", "Instances:", ""]
        lines += [_markdown_table(section.instances)]
        if section.refusals:
            lines += ["", "Why it was not published:", ""]
            lines += [f"- {text}" for text in section.refusals]
        lines += ["", *(f"![{caption}]({file})" for caption, file in section.pictures)]
    return "\n".join([*lines, "", "## SLO targets", "", _markdown_table(_slo(result)), ""])


def _section(profile: ProfileResult, pictures: list[tuple[str, str]]) -> ProfileSection:
    found = profile.found
    version = f"version {profile.version}" if profile.version else "not published"
    slow = found.slow_instances
    names = sorted({*profile.instances, *profile.lost_instances})
    return ProfileSection(
        title=f"{profile.profile}: {version}",
        fingerprint=profile.fingerprint,
        constants=[_constant(profile, name) for name in CONSTANT_NAMES],
        heldout=[
            {
                "part": name,
                "median": f"{part.median:.1%}",
                "90th percentile": f"{part.p90:.1%}",
                "points": str(part.count),
                "fitted on": str(found.parts[name].points),
                "without weight": str(found.parts[name].outliers),
                "spread of one": f"{found.parts[name].sigma:.1%}",
            }
            for name, part in found.heldout.items()
        ],
        instances=[
            {
                "instance": name,
                "scale": f"{found.instance_scale[name]:.3f}"
                if name in found.instance_scale
                else "",
                "remark": profile.lost_instances.get(name, "")
                or (f"{slow[name] - 1:.0%} slower than its like" if name in slow else ""),
            }
            for name in names
        ],
        refusals=[refusal.message for refusal in profile.refusals],
        pictures=pictures,
    )


def _constant(profile: ProfileResult, name: str) -> dict[str, str]:
    found = profile.found
    measured = found.measured.get(name)
    error = found.standard_error(name)
    return {
        "constant": name,
        "value": f"{getattr(found.constants, name):.4g}",
        "standard error": f"{error:.2g}" if error >= 0 else "not measured",
        "can move a prediction by": f"{measured.influence:.1%}" if measured else "",
    }


def _gates(result: CalibrationResult) -> Rows:
    return [
        {
            "gate": gate.name,
            "result": "passed" if gate.passed else "FAILED",
            "comparisons": str(gate.checks),
            "detail": gate.detail,
        }
        for gate in result.gates
    ]


def _slo(result: CalibrationResult) -> Rows:
    return [
        {
            "class": name,
            "TTFT": f"{1e3 * targets.ttft_seconds:.1f} ms",
            "TPOT": f"{1e3 * targets.tpot_seconds:.1f} ms",
            "TTFT that grows with the prompt": f"{1e3 * targets.ttft_base_seconds:.1f} ms + "
            f"{1e6 * targets.ttft_seconds_per_token:.1f} us a token",
        }
        for name, targets in result.slo.items()
    ]


def _html_table(rows: Rows) -> str:
    if not rows:
        return "<p>None.</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row.values()) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _markdown_table(rows: Rows) -> str:
    if not rows:
        return "None."
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "--|" * len(rows[0])]
    lines += ["| " + " | ".join(v.replace("|", "\\|") for v in r.values()) + " |" for r in rows]
    return "\n".join(lines)


def _when(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
