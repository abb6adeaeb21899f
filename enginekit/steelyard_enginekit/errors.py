"""What can go wrong in the engine kit."""


class EngineKitError(Exception):
    """Base of every error below; the commands print it as one JSON line and exit 2."""


class InvalidSpecError(EngineKitError):
    """Raised when a cluster spec is not JSON or a field is missing, unknown or out of range.

    The caller corrects the spec; nothing was started.
    """


class UnknownServerError(EngineKitError):
    """Raised when a command names a server that the spec does not.

    The caller corrects the name; nothing was touched.
    """


class StartupError(EngineKitError):
    """Raised when a server dies or stays unhealthy past the start-up timeout.

    The caller reads the log that the message names. At first start the launcher has taken every
    server down by then; after a `restart` command the others go on.
    """


class InvalidPaceError(EngineKitError):
    """Raised when the pace of a paced server cannot be read; the message names the field.

    The caller corrects the variable and starts the server again; it did not come up.
    """
