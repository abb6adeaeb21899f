"""What the control plane refuses; Redis being away is `servicekit.errors.RedisUnavailable`."""

from servicekit.errors import Aborted, FailedPrecondition, NotFound


class Unregistered(NotFound):
    """Raised when an epoch reports that is not the registered one; the agent registers again."""

    default_reason = "UNREGISTERED"


class UnknownInstance(NotFound):
    """Raised when no instance of that id is registered; the caller lists the cluster."""

    default_reason = "UNKNOWN_INSTANCE"


class UnknownConstants(NotFound):
    """Raised when a profile has no such version; the caller lists the versions."""

    default_reason = "UNKNOWN_CONSTANTS"


class EpochReplaced(FailedPrecondition):
    """Raised when an epoch registers whose instance has booted again since.

    Two agents share one instance id, or an agent outlived its engine: the operator ends one.
    """

    default_reason = "EPOCH_REPLACED"


class ConstantsJump(FailedPrecondition):
    """Raised when a value is far from the current version's; the caller sets accept_jump."""

    default_reason = "CONSTANTS_JUMP"


class CalibrationRunning(FailedPrecondition):
    """Raised when somebody else calibrates; the caller waits for the named holder to end."""

    default_reason = "CALIBRATION_RUNNING"


class CalibrationLockLost(Aborted):
    """Raised when the lock was lost while it was held; the caller publishes nothing."""

    default_reason = "CALIBRATION_LOCK_LOST"


class ChangedMeanwhile(Aborted):
    """Raised when another replica changed the same thing first; the caller looks and retries."""

    default_reason = "CHANGED_MEANWHILE"
