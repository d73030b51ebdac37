"""Which kernels run, where it matters who computes the gradients of weights."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """Counts the costly kernels, and what convolutions are asked for."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.counts["conv x"] += args[10][0]
            self.counts["conv w"] += args[10][1]
        elif func in (torch.ops.aten.mm.default, torch.ops.aten.embedding_dense_backward.default):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
