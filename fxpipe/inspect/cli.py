"""The command `python -m fxpipe.inspect`: loads a model, plans its pipeline and shows the result.

Standard output has only the requested output; what the user's code prints goes to standard error. Errors that the user
can fix end in one line there and exit status 2. A traceback is a bug in fxpipe.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
from collections.abc import Sequence

from fxpipe.errors import FxpipeError, MemoryLimitError
from fxpipe.inspect.cli_options import as_options, parse_request

# Nothing above imports torch, so that --help is fast.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status: 0, 2 for an error that the user can fix, 130 if interrupted."""
    try:
        request = parse_request(sys.argv[1:] if argv is None else argv)
        out = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            from fxpipe.inspect.run import output_text, run_request, write_outputs
            from fxpipe.utils.progress import is_terminal, show_progress
            from fxpipe.utils.text_table import TEXT_WIDTH, use_text_width

            with show_progress(not request.no_progress and is_terminal()):
                inspection = run_request(request)
            is_said = out.isatty() or "COLUMNS" in os.environ
            width = shutil.get_terminal_size((TEXT_WIDTH, 24)).columns if is_said else TEXT_WIDTH
            with use_text_width(width):
                text = output_text(inspection, request)
            written = write_outputs(inspection, request.outputs)
        print(text)
        for line in written:
            print(f"fxpipe.inspect: {line}", file=sys.stderr)
    except FxpipeError as error:
        words = error.brief if isinstance(error, MemoryLimitError) else str(error)
        print(f"fxpipe.inspect: {as_options(' '.join(words.split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fxpipe.inspect: interrupted", file=sys.stderr)
        return 130  # as in shells: 128 + SIGINT
    return 0


def set_up_process() -> None:
    """Sets up the process. Call it before torch is loaded, when OpenMP reads the environment."""
    # Waiting threads spin for milliseconds. If other work shares the cores, that doubles the time.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # microseconds instead
    # Nearly all objects belong to imported modules, and stay; repeated collections would take a second.
    gc.set_threshold(50_000, 50, 100)
