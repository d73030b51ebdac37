"""`python -m fxpipe.inspect`: see `cli`."""

import io
import os
import sys

try:
    from fxpipe.inspect.cli import finish_process, main, set_up_process

    set_up_process()
except KeyboardInterrupt:  # as `main` ends, which is not there yet
    print("fxpipe.inspect: interrupted", file=sys.stderr)
    sys.exit(130)
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # a terminal or file that has no letter for a name gets a mark for it
try:
    status = main(sys.argv[1:])
    sys.stdout.flush()
except BrokenPipeError:
    # The reader has seen enough (`... | head`). Python flushes once more at exit, which must find an open file.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status = 1
finish_process()
sys.exit(status)
