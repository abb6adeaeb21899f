"""The verdict on a run of paced engines."""

import os
from pathlib import Path

import pytest

from localcluster.pace_check import MachineLoad, StepRow, judge
from localcluster.pace_machine import CpuTimes, MachineWatch, descendants, load_between
from localcluster.pace_records import read_steps

QUIET = MachineLoad(seconds=60.0, cores=2, own_share=0.4, other_share=0.02)


def steps(count: int, *, late: float = 0.0, real: float = 1.0, carried: bool = True):
    """Steps of 40 ms, late by a share of it."""
    return [
        StepRow(
            end_unix=float(i),
            modelled_seconds=0.040,
            real_seconds=0.040 * real,
            late_seconds=0.040 * late,
            carried=carried,
        )
        for i in range(count)
    ]


def test_a_run_with_few_late_steps_on_a_quiet_machine_is_valid():
    """Exactly one step in twenty may be late, however late."""
    verdict = judge({"decode-0": steps(95) + steps(5, late=0.5)}, QUIET)

    assert verdict.valid
    assert verdict.reasons == ()
    assert verdict.pace.late_share == pytest.approx(0.05)
    assert verdict.pace.very_late_share == pytest.approx(0.05)
    assert verdict.text().startswith("valid\n100 steps, 5.0% over 5 % late")


def test_more_late_steps_make_a_run_invalid():
    """The share is over all engines together, so one quiet engine does not save another."""
    verdict = judge({"decode-0": steps(40), "decode-1": steps(56) + steps(4, late=0.06)}, QUIET)
    worse = judge({"decode-0": steps(40), "decode-1": steps(54) + steps(6, late=0.06)}, QUIET)

    assert verdict.valid
    assert not worse.valid
    assert "6.0% of steps are over 5 % late" in worse.reasons[0]
    assert worse.engines["decode-0"].late_share == 0.0
    assert worse.engines["decode-1"].late_share == pytest.approx(0.1)


@pytest.mark.parametrize(("real", "valid"), [(1.015, True), (1.03, False), (0.97, False)])
def test_a_wrong_mean_makes_a_run_invalid(real: float, valid: bool):
    """Where no single step is late, the mean may still be off, on either side."""
    assert judge({"decode-0": steps(100, real=real)}, QUIET).valid is valid


def test_only_steps_that_followed_others_count_for_the_mean():
    """An idle engine's first step has no interval before it."""
    verdict = judge({"p": steps(10, real=3.0, carried=False) + steps(10)}, QUIET)

    assert verdict.pace.real_to_modelled == pytest.approx(1.0)


def test_a_busy_machine_makes_a_run_invalid():
    """Even with no step late; a run that nobody watched says so."""
    busy = MachineLoad(seconds=60.0, cores=2, own_share=0.4, other_share=0.2)
    verdict = judge({"decode-0": steps(100)}, busy)

    assert verdict.reasons == ("20% of the machine went to something else",)
    assert "nobody watched" in judge({"decode-0": steps(100)}, None).text()


def test_a_run_without_steps_is_invalid():
    """Nothing was shown."""
    verdict = judge({"decode-0": []}, QUIET)

    assert verdict.reasons == ("no step was recorded",)


def test_a_line_under_way_is_left_out(tmp_path: Path):
    """A reader may come while an engine writes."""
    path = tmp_path / "p.steps.jsonl"
    whole = '{"end_unix":1,"modelled_seconds":1,"real_seconds":1,"late_seconds":0,"carried":true}\n'
    path.write_text(whole + whole[:40])

    assert len(read_steps(path, 0.0, 2.0)) == 1


def test_a_run_owns_its_processes_old_and_new():
    """Children that came or ended meanwhile count; the rest of the machine's work is others'."""
    before = CpuTimes(working=100.0, own={1: 5.0, 2: 3.0})
    # 2 has ended after 4 s in all, which stand with its parent, 1, now; 3 is new.
    after = CpuTimes(working=120.0, own={1: 5.0 + 1.0 + 4.0, 3: 2.0})

    load = load_between(before, after, seconds=20.0, cores=2)

    assert load.own_share == pytest.approx((1.0 + 1.0 + 2.0) / 40)
    assert load.other_share == pytest.approx((20.0 - 4.0) / 40)


def test_descendants_are_found_through_sessions_and_generations():
    """Parents alone decide."""
    assert descendants({2: 1, 3: 2, 4: 3, 5: 1, 6: 5}, 2) == {2, 3, 4}


@pytest.mark.asyncio
async def test_a_watch_sees_this_process_work():
    """Half a second of our own computing is ours, on the real machine."""
    import time

    async with MachineWatch() as watch:
        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass

    load = watch.load
    assert load is not None
    assert load.cores == os.cpu_count()
    assert load.own_share * load.cores * load.seconds >= 0.45
