"""The exceptions of fxpipe. Each also derives from the matching built-in class."""


class FxpipeError(Exception):
    """Base class of all exceptions of fxpipe; the user's exceptions are not instances of it."""


class ArgumentError(FxpipeError, ValueError):
    """An argument has a value that cannot be used."""


class FileError(ArgumentError, OSError):
    """A file cannot be written to the path in an argument. Also an `OSError`, as `open` would raise."""


class UnequalOutputsError(ArgumentError):
    """Outputs of micro-batches cannot be combined because of their sizes."""


class ArgumentTypeError(FxpipeError, TypeError):
    """An argument has a type that cannot be used."""


class TraceError(FxpipeError, RuntimeError):
    """The model does something that the tracer cannot put into a graph."""


class DecisionError(FxpipeError, RuntimeError):
    """A check in forward fails for these samples, on a value that only a stage has (`torch.distributions`)."""


class PartitionError(FxpipeError, ValueError):
    """The graph cannot be cut as requested."""


class TooManyStagesError(PartitionError):
    """The graph has too few places for cuts for this number of stages."""

    def __init__(self, problem: str, most: int, remedy: str = "") -> None:
        """`most`: largest possible number of stages. `remedy`: what to use, if not just fewer stages."""
        advice = f". Use {remedy or f'stages={most} or fewer'}" if most else ""
        super().__init__(problem + advice)
        self.problem, self.most, self.remedy = problem, most, remedy


class MemoryLimitError(PartitionError):
    """No cut keeps every stage within the memory of its device."""

    def __init__(self, message: str, brief: str = "", over: float = 0.0) -> None:
        super().__init__(message)
        self.brief = brief or message  # the message without its table
        self.over = over  # bytes of memory missing for each stage; 0: unknown


class ScheduleError(FxpipeError, ValueError):
    """A schedule that would not run: an action is missing, doubled, out of order, or two rows wait for each other."""


class LossError(FxpipeError, ValueError):
    """The loss cannot be computed micro-batch by micro-batch, or is not a scalar tensor."""


class StateError(FxpipeError, RuntimeError):
    """The state of the pipe does not allow the call: it is closed, its backward has run, a step is running."""


class DistributedError(FxpipeError, RuntimeError):
    """Another process of a pipe has failed, has ended or does not answer, or its calls differ from this process's."""


class TorchVersionError(FxpipeError, ImportError):
    """This version of torch lacks something that fxpipe needs."""


class InternalError(FxpipeError, RuntimeError):
    """An invariant of fxpipe is broken: a bug in fxpipe, please report it."""
