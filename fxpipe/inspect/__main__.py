"""`python -m fxpipe.inspect`: see `cli`."""

import gc
import io
import os
import sys

try:
    from fxpipe.inspect.cli import main, set_up_process

    set_up_process()
except KeyboardInterrupt:  # as in `main`, which is not imported yet
    print("fxpipe.inspect: interrupted", file=sys.stderr)
    sys.exit(130)
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # characters that the terminal or file cannot encode
try:
    status = main(sys.argv[1:])
    sys.stdout.flush()
except BrokenPipeError:
    # The reader closed the pipe (`... | head`). Python flushes again at exit, and needs an open file then.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status = 1
gc.freeze()  # skips the last garbage collection, which takes a second
sys.exit(status)
