"""What the evaluation raises."""


class EvaluationError(Exception):
    """Anything wrong with an evaluation's input; the CLI shows the message and exits with 2."""


class InvalidWorkloadError(EvaluationError, ValueError):
    """A workload's description is incomplete or outside its range; raised while reading it.

    The message names the file, the field and what it may be.
    """


class UnknownExperimentError(EvaluationError, ValueError):
    """There is no experiment of that name; the message holds those that there are."""


class UnknownBackendError(EvaluationError, ValueError):
    """There is no backend of that name; the message holds those that there are."""


class TraceFormatError(EvaluationError, ValueError):
    """A trace file is none of the known formats, or a row of it cannot be read.

    The message names file and row; the caller corrects the file or names its format.
    """


class MissingResultsError(EvaluationError, LookupError):
    """A published table or sentence wants a result that no file has; the message says which.

    Whoever renders a document leaves what it stands in as it is and says so.
    """
