"""Pictures of a fit: curves over the points, and residuals. Needs matplotlib (the extra `report`)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from calibrator.design import prefill_times
from calibrator.observations import chunks_of
from calibrator.profile import (
    Observations,
    ProfileFit,
    predict_decode,
    predict_handoff,
    predict_prefill,
)
from enginemodel.model import decode_step_seconds, handoff_seconds

_TRAIN, _HELD, _CURVE = "#4477aa", "#ee6677", "#222222"
_SIZE = (10.0, 4.0)
_RESIDUAL_LIMIT = 0.3


def draw(
    directory: Path, stem: str, found: ProfileFit, seen: Observations, kv_bytes_per_token: int
) -> list[tuple[str, str]]:
    """Write the pictures of one profile.

    Args:
        directory: Exists.
        stem: Begins every file name.
        found: The fit.
        seen: What it was made from.
        kv_bytes_per_token: Of the profile.

    Returns:
        (caption, file name) of each.
    """
    pictures: list[tuple[str, Figure]] = []
    if found.prefill and seen.prefill:
        pictures.append(("prefill", _prefill(found, seen)))
    if found.decode and seen.decode:
        pictures.append(("decode", _decode(found, seen)))
    if found.handoff and seen.handoff:
        pictures.append(("handoff", _handoff(found, seen, kv_bytes_per_token)))
    files = []
    for name, figure in pictures:
        path = directory / f"{stem}-{name}.png"
        figure.savefig(path, dpi=110)
        files.append((name, path.name))
    return files


def _prefill(found: ProfileFit, seen: Observations) -> Figure:
    figure, left, right = _pair("Prefill", "prompt tokens in the step(s)")
    points = seen.prefill
    scale = found.prefill.scale if found.prefill else {}
    tokens = np.array([o.tokens for o in points], dtype=float)
    times = np.array([o.seconds / scale.get(o.instance_id, 1.0) for o in points])
    held = np.array([o.held_out for o in points])
    _scatter(left, tokens, 1e3 * times, held)
    longest = max((s.tokens for o in points for s in o.steps), default=1)
    curve = np.geomspace(tokens.min(), tokens.max(), 200).round().astype(int)
    shapes = [chunks_of(int(n), longest) for n in curve]
    left.plot(curve, 1e3 * prefill_times(found.constants, shapes), color=_CURVE, label="fit")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_ylabel("time, ms (scaled to the typical instance)")
    left.legend(frameon=False)
    right.set_xscale("log", base=2)
    _residuals(right, tokens, [o.seconds for o in points], predict_prefill(found, points), held)
    return figure


def _decode(found: ProfileFit, seen: Observations) -> Figure:
    figure, left, right = _pair("Decode step", "KV tokens in the batch")
    points = seen.decode
    scale = found.decode.scale if found.decode else {}
    kv = np.array([o.kv_tokens for o in points])
    times = np.array([o.seconds / scale.get(o.instance_id, 1.0) for o in points])
    held = np.array([o.held_out for o in points])
    _scatter(left, kv, 1e3 * times, held)
    curve = np.geomspace(max(kv.min(), 1.0), kv.max(), 100)
    batches = sorted({round(o.sequences) for o in points if not o.held_out})
    shown = [batches[round(i * (len(batches) - 1) / 3)] for i in range(4)] if batches else []
    gap, labelled = 0.04 * 1e3 * float(times.max()), list[float]()
    for batch in dict.fromkeys(shown):
        line = [1e3 * decode_step_seconds(found.constants, batch, n) for n in curve]
        left.plot(curve, line, color=_CURVE, linewidth=0.8)
        if all(abs(line[0] - other) > gap for other in labelled):
            labelled.append(line[0])
            left.annotate(f"B={batch}", (curve[0], line[0]), fontsize=8, va="bottom")
    left.set_xscale("log")
    left.set_ylabel("step, ms (scaled to the typical instance)")
    left.legend(frameon=False)
    right.set_xscale("log")
    _residuals(right, kv, [o.seconds for o in points], predict_decode(found, points), held)
    return figure


def _handoff(found: ProfileFit, seen: Observations, kv_bytes: int) -> Figure:
    figure, left, right = _pair("Hand-off to first token", "prompt tokens")
    points = seen.handoff
    tokens = np.array([o.prompt_tokens for o in points], dtype=float)
    held = np.array([o.held_out for o in points])
    _scatter(left, tokens, 1e3 * np.array([o.seconds for o in points]), held)
    curve = np.linspace(tokens.min(), tokens.max(), 100)
    line = [
        1e3
        * (
            handoff_seconds(found.constants, int(n), kv_bytes)
            + decode_step_seconds(found.constants, 1, n)
        )
        for n in curve
    ]
    left.plot(curve, line, color=_CURVE, label="fit")
    left.set_ylabel("time, ms")
    left.set_ylim(bottom=0)
    left.legend(frameon=False)
    predicted = predict_handoff(found, points, kv_bytes)
    _residuals(right, tokens, [o.seconds for o in points], predicted, held)
    return figure


def _pair(title: str, x_label: str) -> tuple[Figure, Axes, Axes]:
    """Return a figure with room for a curve and its residuals."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_title(title)
    right.set_title("Residuals")
    for axes in (left, right):
        axes.set_xlabel(x_label)
        axes.grid(visible=True, alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, left, right


def _scatter(
    axes: Axes, x: "np.ndarray[tuple[int], np.dtype[np.float64]]", y: object, held: object
) -> None:
    values, out = np.asarray(y, dtype=float), np.asarray(held, dtype=bool)
    axes.scatter(
        x[~out], values[~out], s=8, alpha=0.4, color=_TRAIN, label="fitted on", linewidths=0
    )
    axes.scatter(x[out], values[out], s=14, alpha=0.8, color=_HELD, label="held out", linewidths=0)


def _residuals(
    axes: Axes,
    x: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    seconds: Sequence[float],
    predicted: Sequence[float],
    held: object,
) -> None:
    ratio = np.asarray(seconds) / np.asarray(predicted) - 1
    beyond = int((np.abs(ratio) > _RESIDUAL_LIMIT).sum())
    _scatter(axes, x, 100 * np.clip(ratio, -_RESIDUAL_LIMIT, _RESIDUAL_LIMIT), held)
    axes.axhline(0, color=_CURVE, linewidth=0.8)
    axes.set_ylabel("observed over predicted, %")
    limit = 105 * _RESIDUAL_LIMIT
    axes.set_ylim(-limit, limit)
    if beyond:
        axes.set_title(f"Residuals ({beyond} beyond ±{_RESIDUAL_LIMIT:.0%}, drawn at the edge)")
