"""The command `python -m fxpipe.inspect`: make a model, plan its pipeline, show what becomes of it.

Standard output has what was asked for and nothing else: what the user's code prints goes to standard error. Whatever
the user can mend ends in one line there and exit status 2. A traceback is a bug in fxpipe.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from fxpipe.errors import FxpipeError, MemoryLimitError
from fxpipe.inspect.request import parse_request, with_option_name

# Neither torch nor anything that imports it is imported above: --help answers at once.

EXIT_INTERRUPTED = 130  # as a shell has it: 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status: 0, 2 for what the user has to mend, 130 if interrupted."""
    try:
        request = parse_request(sys.argv[1:] if argv is None else argv)
        out = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            from fxpipe.inspect.output import output_text, write_outputs
            from fxpipe.inspect.run import run_request
            from fxpipe.utils.progress import is_terminal, show_progress
            from fxpipe.utils.text_table import use_text_width

            with show_progress(not request.no_progress and is_terminal()):
                findings = run_request(request)
            with use_text_width(_width_of(out)):
                text = output_text(findings, request)
            written = write_outputs(findings, request.outputs)
        print(text)
        for line in written:
            print(f"fxpipe.inspect: {line}", file=sys.stderr)
    except FxpipeError as error:
        words = error.brief if isinstance(error, MemoryLimitError) else str(error)
        print(f"fxpipe.inspect: {with_option_name(' '.join(words.split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fxpipe.inspect: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _width_of(out: TextIO) -> int:
    """Returns how many characters a line of the output may have: as wide as the window, or as `COLUMNS` says."""
    from fxpipe.utils.text_table import TEXT_WIDTH

    is_said = out.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size((TEXT_WIDTH, 24)).columns if is_said else TEXT_WIDTH


# -- Set-up of the command's process: it is short, looks at one model, and somebody waits for it ---------------------


def set_up_process() -> None:
    """Sets up the process; to be called before torch is loaded, whose OpenMP reads the environment then."""
    # Threads that wait for each other spin for milliseconds. With other work on the same cores they keep each other
    # from running, and all takes twice as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # some microseconds
    # Nearly all objects are of imported modules, and stay: to look at them again and again takes a second.
    gc.set_threshold(50_000, 50, 100)


def finish_process() -> None:
    """Skips the last garbage collection, which takes another second; to be called at the end: the system frees all."""
    gc.freeze()
