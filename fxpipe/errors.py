"""Every exception that fxpipe raises on purpose; each is also the built-in class one would expect."""


class FxpipeError(Exception):
    """Base of all of them: to catch what fxpipe refused, and nothing of the user's own."""


class ArgumentError(FxpipeError, ValueError):
    """An argument has a value that cannot be used."""


class FileError(ArgumentError, OSError):
    """A file cannot be written where an argument says: also what `open` would raise."""


class UnequalOutputsError(ArgumentError):
    """Outputs of micro-batches have sizes with which they cannot be put together."""


class ArgumentTypeError(FxpipeError, TypeError):
    """An argument has a type that cannot be used."""


class TraceError(FxpipeError, RuntimeError):
    """The model does something that the tracer cannot put into a graph."""


class DecisionError(FxpipeError, RuntimeError):
    """A check of forward's fails for these samples, of a value that only a stage knows (`torch.distributions`)."""


class PartitionError(FxpipeError, ValueError):
    """The graph cannot be cut as asked."""


class TooManyStagesError(PartitionError):
    """The graph has fewer places for cuts than so many stages need."""

    def __init__(self, problem: str, most: int, remedy: str = "") -> None:
        """`most`: so many stages there can be. `remedy`: what to use, where that is not simply fewer stages."""
        advice = f". Use {remedy or f'stages={most} or fewer'}" if most else ""
        super().__init__(problem + advice)
        self.problem, self.most, self.remedy = problem, most, remedy


class MemoryLimitError(PartitionError):
    """No cut keeps every stage within the memory of its device."""

    def __init__(self, message: str, brief: str = "", over: float = 0.0) -> None:
        super().__init__(message)
        self.brief = brief or message  # the message without its table
        self.over = over  # bytes: with so many more for each stage there would be a cut; 0: not known


class ScheduleError(FxpipeError, ValueError):
    """A schedule that would not run: an action is missing, doubled, out of order, or two rows wait for each other."""


class LossError(FxpipeError, ValueError):
    """The loss cannot be taken micro-batch by micro-batch, or is no scalar tensor."""


class StateError(FxpipeError, RuntimeError):
    """The pipe is in no state for what was asked: it is closed, its backward has run, a step is running."""


class DistributedError(FxpipeError, RuntimeError):
    """Another process of a pipe has failed, is gone or does not answer, or does something else than this one."""


class TorchVersionError(FxpipeError, ImportError):
    """This version of torch lacks something that fxpipe needs."""


class InternalError(FxpipeError, RuntimeError):
    """A rule that fxpipe keeps for itself was broken: a bug in fxpipe, please report it."""
