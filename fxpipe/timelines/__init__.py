"""When each action of a step runs, simulated or measured: spans, and the memory that follows from them.

All that shows them starts from a `Step` (`steps.py`): `text.py` and `terminal.py` print it, `pictures.py` draws it into
files (`gantt.py`, `pages.py`), `traces.py` writes it for Perfetto, `html.py` for notebooks.
"""

from fxpipe.timelines.spans import Memory, Parts, Span, memory_of

__all__ = ["Memory", "Parts", "Span", "memory_of"]
