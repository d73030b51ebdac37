"""The command `python -m fxpipe.inspect`: make a model, plan its pipeline, show what becomes of it.

Standard output has what was asked for and nothing else: what the user's code prints goes to standard error. Whatever
the user can mend ends in one line there and exit status 2. A traceback is a bug in fxpipe.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from fxpipe.errors import FxpipeError, MemoryLimitError
from fxpipe.inspect.request import in_options, parse_request

# Neither torch nor anything that imports it is imported above: --help answers at once.

INTERRUPTED = 130  # as a shell has it: 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` says and return the exit status: 0, 2 where the user has something to mend, 130 if interrupted."""
    try:
        request = parse_request(sys.argv[1:] if argv is None else argv)
        out = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            from fxpipe.inspect.finding import find
            from fxpipe.inspect.showing import shown, write_files
            from fxpipe.progress import showing

            with showing(request.progress):
                found = find(request)
            text = shown(found, request, out)
            write_files(found, request.outputs)
        print(text)
    except FxpipeError as error:
        words = error.brief if isinstance(error, MemoryLimitError) else str(error)
        print(f"fxpipe.inspect: {in_options(' '.join(words.split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fxpipe.inspect: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0
