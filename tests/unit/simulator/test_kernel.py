import pytest

from simulator.errors import PastEventError
from simulator.kernel import Kernel, Priority


def test_order():
    """Events run by time, then by priority, then in the order they were asked for."""
    kernel, seen = Kernel(), []
    kernel.at(2.0, Priority.ENGINE, seen.append, "late")
    kernel.at(1.0, Priority.TELEMETRY, seen.append, "telemetry")
    kernel.at(1.0, Priority.WIRE, seen.append, "first")
    kernel.at(1.0, Priority.WIRE, seen.append, "second")

    kernel.run()

    assert seen == ["first", "second", "telemetry", "late"]


def test_until():
    """A run up to a time leaves what is later and moves the clock to that time."""
    kernel, seen = Kernel(), []
    kernel.at(1.0, Priority.WIRE, seen.append, 1)
    kernel.at(3.0, Priority.WIRE, seen.append, 3)

    kernel.run(until=2.0)

    assert (seen, kernel.now, len(kernel)) == ([1], 2.0, 1)


def test_past():
    """An event in the past is refused."""
    kernel = Kernel()
    kernel.run(until=5.0)

    with pytest.raises(PastEventError):
        kernel.at(4.0, Priority.WIRE, print)
