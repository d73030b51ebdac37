"""What one thread of the process does at a time: to trace, to profile, to compile a stage.

All three run a model under dispatch modes of torch. Who enters one sets flags of the process, and on leaving sets them
back to what they were; of two threads that leave in another order than they entered, one sets back what the other had
set. The flags would then stay for good, and by them torch.compile stands aside, without a word.
"""

from __future__ import annotations

import threading

one_at_a_time = threading.RLock()
