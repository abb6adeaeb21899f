"""What bringing a cluster up raises."""


class ClusterError(Exception):
    """Raised when a part does not come up, or dies; the message says which and shows its last lines.

    The caller shows it; everything that was started is down again.
    """


class PoolsError(ValueError):
    """Raised when a description of pools cannot be read; the message shows the form."""
