"""`python -m fxpipe.inspect`: see `cli`."""

import io
import os
import sys

from fxpipe.inspect.cli import main

# While torch's threads wait for each other they shall sleep: beside other work on the same cores, those that spin keep
# the others from going on, and all takes more than twice as long. OpenMP reads it when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # a terminal or file that has no letter for a name gets a mark for it
try:
    status = main(sys.argv[1:])
    sys.stdout.flush()
except BrokenPipeError:
    # The reader has seen enough (`... | head`). Python flushes once more at exit, which must find an open file.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status = 1
sys.exit(status)
