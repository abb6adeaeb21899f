"""Hand-offs among the steps of their engine: which step gave the token, and what that says."""

import json

import pytest

from evaluation.handoff_steps import cut_out, expected_steps, explain, step_counts
from evaluation.handoffs_app import handoffs

ENDS = [float(i) for i in range(20)]
CARRIED = [True] * 20
LOOK_EARLY, LOOK_LATE = 0.1, 0.9


def handoff(*, sent_at=3.5, token_at=7.1, transfer_seconds=0.4, carried=CARRIED):
    """Return a hand-off to an engine with steps of a second."""
    return cut_out(
        ENDS, carried, sent_at=sent_at, token_at=token_at, transfer_seconds=transfer_seconds
    )


def test_steps_are_counted_from_sending_to_the_step_that_gave_the_token():
    """Sent during the fourth step, token from the seventh: four step ends, .1 s on the way back."""
    found = handoff()

    assert found.steps == 4
    assert found.way_back_seconds == pytest.approx(0.1)
    assert found.transfer_steps == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("share", "transfer_seconds", "steps"),
    [
        (LOOK_LATE, 0.4, 3),
        (LOOK_EARLY, 0.4, 4),
        (LOOK_EARLY, 0.05, 3),
        (LOOK_EARLY, 1.5, 5),
        (LOOK_LATE, 1.5, 4),
    ],
)
def test_the_first_look_after_the_pull_decides(share, transfer_seconds, steps):
    """A pull that is not done when a step looks waits for the next look; the token comes a step later."""
    found = handoff(token_at=9.1, transfer_seconds=transfer_seconds)

    assert expected_steps(found, notice_share=share, way_seconds=0.1) == steps


def test_who_is_not_there_in_time_waits_for_the_next_step():
    """A request still on its way at a step's end begins its pull one step later."""
    found = handoff(sent_at=3.95, token_at=9.1)

    assert expected_steps(found, notice_share=LOOK_EARLY, way_seconds=0.1) == 5


def test_the_right_share_explains_what_the_wrong_one_does_not():
    """Tokens that came from early looks are expected by an early look only."""
    found = [handoff(sent_at=s + 0.2, token_at=s + 4.1) for s in (1.0, 4.0, 9.0)]

    early = explain(found, LOOK_EARLY, way_seconds=0.1)
    late = explain(found, LOOK_LATE, way_seconds=0.1)

    assert (early.same, early.mean_off) == (1.0, 0.0)
    assert (late.same, late.mean_off) == (0.0, -1.0)
    assert step_counts(found) == {0: {4: 3}}


@pytest.mark.parametrize(
    "changes",
    [
        {"carried": [True] * 5 + [False] + [True] * 14},
        {"sent_at": -0.5},
        {"token_at": 19.5},
        {"token_at": 3.9},
    ],
)
def test_an_engine_that_paused_tells_nothing(changes):
    """Hand-offs to engines that stood still, or whose steps are not on record, are left out."""
    assert handoff(**changes) is None


def test_the_command_reads_what_a_paced_cluster_leaves(tmp_path, capsys):
    """Journal and step records of a cluster give the table; engine seconds are undilated."""
    (tmp_path / "engines").mkdir()
    steps = [
        {
            "end_unix": 100.0 + 0.05 * i,
            "modelled_seconds": 0.05,
            "real_seconds": 0.05,
            "late_seconds": 0.0,
            "carried": True,
        }
        for i in range(40)
    ]
    lines = "".join(json.dumps(step) + "\n" for step in steps)
    (tmp_path / "engines" / "decode-0.steps.jsonl").write_text(lines)
    request = {
        "type": "request",
        "arrived_unix": 100.51,
        "decode_id": "decode-0",
        "decode_sent_seconds": 0.002,
        "ttft_seconds": 0.049,
        "prompt_tokens": 100,
        "attempts": 1,
    }
    (tmp_path / "router.jsonl").write_text(json.dumps(request, separators=(",", ":")) + "\n")

    assert handoffs(tmp_path, dilation=4.0) == 0

    text = " ".join(capsys.readouterr().out.split())
    assert "1 hand-offs to busy engines; way back 6.0 ms" in text
    assert "0.10 100 % +0.00" in text


def test_a_directory_without_a_journal_is_refused(tmp_path, capsys):
    """The error names the file that is missing and what makes one."""
    assert handoffs(tmp_path) == 2
    assert "evaluate --backend paced" in " ".join(capsys.readouterr().out.split())
