"""When each action of a step runs, simulated or measured: spans, the memory that follows from them, text to print."""

from fxpipe.timelines.spans import Memory, Parts, Span, memory_of

__all__ = ["Memory", "Parts", "Span", "memory_of"]
