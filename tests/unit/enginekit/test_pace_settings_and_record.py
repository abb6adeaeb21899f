"""What a paced server is told, and what it writes down."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from steelyard_enginekit.errors import InvalidPaceError
from steelyard_enginekit.paced.pacer import PacedStep
from steelyard_enginekit.paced.record import StepRecord
from steelyard_enginekit.paced.settings import parse_settings
from steelyard_enginekit.paced.shape import StepShape

from enginemodel.profiles import REFERENCE
from localcluster.pace import paced_server
from localcluster.pace_records import read_steps
from localcluster.spec import ClusterSpec

GOOD = {"constants": asdict(REFERENCE.constants), "kv_bytes_per_token": 36_864}


def test_a_server_reads_what_a_cluster_tells_it(tmp_path: Path):
    """Constants stay undilated beside the dilation, which is one over the time scale."""
    spec = ClusterSpec(
        engine="paced",
        time_scale=0.25,
        directory=tmp_path,
        profile_overrides={"constants": {"d0_seconds": 0.02}},
    )

    settings = parse_settings(paced_server(spec, "decode-1")["environment"]["STEELYARD_PACE"])

    assert settings.constants.d0_seconds == 0.02
    assert settings.constants.p0_seconds == REFERENCE.constants.p0_seconds
    assert settings.kv_bytes_per_token == REFERENCE.kv_bytes_per_token
    assert settings.dilation == 4.0
    assert settings.record == (tmp_path / "engines" / "decode-1.steps.jsonl").resolve()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "JSON"),
        ("[]", "constants"),
        (json.dumps({"constants": GOOD["constants"]}), "kv_bytes_per_token"),
        (json.dumps(GOOD | {"constants": {"d0_seconds": 1}}), "missing"),
        (json.dumps(GOOD | {"constants": GOOD["constants"] | {"d0_seconds": -1}}), "negative"),
        (json.dumps(GOOD | {"constants": GOOD["constants"] | {"d0_seconds": "1"}}), "numbers"),
        (json.dumps(GOOD | {"speed": 2}), "speed"),
        (json.dumps(GOOD | {"dilation": 0}), "dilation"),
        (json.dumps(GOOD | {"dilation": "3"}), "dilation"),
        (json.dumps(GOOD | {"carry_seconds": -1}), "carry_seconds"),
    ],
)
def test_what_makes_no_pace_is_refused(text: str, word: str):
    """The message names what is wrong."""
    with pytest.raises(InvalidPaceError, match=word):
        parse_settings(text)


def test_a_recorded_step_is_there_at_once_and_reads_back(tmp_path: Path):
    """Two records of one file follow each other; times between two bounds are returned."""
    path = tmp_path / "engines" / "decode-0.steps.jsonl"
    step = PacedStep(StepShape(((300, 0),), 2, 900, frozenset({"a"})), 0.04, 0.041, 0.001, 0.002, carried=True)  # fmt: skip
    for end in (5.0, 7.0):
        record = StepRecord(path)
        record.write(step, end_unix=end, queue_wait_seconds=0.0005, pulls_held=1)

    (row,) = read_steps(path, 6.0, 8.0)

    assert (row.end_unix, row.modelled_seconds, row.real_seconds) == (7.0, 0.04, 0.041)
    assert (row.late_seconds, row.carried) == (0.001, True)
    line = json.loads(path.read_text().splitlines()[0])
    assert (line["sequences"], line["kv_tokens"], line["chunks"]) == (2, 900, [[300, 0]])
    assert (line["queue_wait_seconds"], line["pulls_held"]) == (0.0005, 1)
