"""Why a calibration ends without publishing, each with the exit code of the command."""
# ruff: noqa: N818  named by what happened

from typing import ClassVar


class CalibrationError(Exception):
    """Any reason to stop; raised by its subclasses only, and shown to the operator as it is."""

    exit_code: ClassVar[int] = 1


class NoReadyInstance(CalibrationError):
    """Raised when the cluster has no READY instance; the operator starts engines and repeats."""

    exit_code = 3


class GateFailed(CalibrationError):
    """Raised when the cluster answers wrongly; the operator repairs the instance that is named."""

    exit_code = 4


class PublicationRefused(CalibrationError):
    """Raised when a fit is not fit to price with; the operator measures longer, or forces it."""

    exit_code = 5


class ClusterUnavailable(CalibrationError):
    """Raised when the control plane or its Redis does not answer; the operator repeats later."""

    exit_code = 6


class CalibrationRunning(CalibrationError):
    """Raised when somebody else holds the calibration lock; the operator waits for them."""

    exit_code = 7


class InstanceLost(CalibrationError):
    """Raised when the last instance of a kind dies under measurement; the operator revives it."""

    exit_code = 8


class ProbeFailed(Exception):
    """Raised when one instance fails a probe; the sweep goes on without that instance."""

    def __init__(self, instance_id: str, message: str) -> None:
        super().__init__(f"{instance_id}: {message}")
        self.instance_id = instance_id
        self.message = message
