"""What the simulator raises."""


class SimulationError(Exception):
    """Anything the simulator raises; a caller shows the message, there is nothing to retry."""


class PastEventError(SimulationError):
    """An event was asked for in the past; a fault in the model, never in its input."""


class InvalidClusterError(SimulationError, ValueError):
    """A cluster cannot be built as described; raised before anything runs.

    The message names the value and its range; the caller corrects the description.
    """


class LostRequestError(SimulationError):
    """A request ended twice or was never ended; a fault in a scheduler or in the model.

    The message names the request; the caller keeps seed and settings, which repeat the run.
    """
