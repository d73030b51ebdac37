"""A pipe over RPC workers, stepped by PyTorch's DistributedOptimizer: python examples/rpc_optimizer.py [steps]

A driver and two workers on this machine. The driver plans the model and sends each worker a stage; distributed autograd
goes back through both, and an optimizer on each worker updates its stage.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc

WORKERS = ["worker1", "worker2"]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def train(steps: int) -> None:
    from torch.distributed.optim import DistributedOptimizer

    from fxpipe.distributed.rpc import RpcPipeline

    x = torch.randn(32, 16)
    target = x[:, :4] * x[:, 4:8]
    with RpcPipeline(make_model(), WORKERS, chunks=4, example_args=(x,)) as pipe:
        print(pipe.plan)
        optimizer = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.2)
        for step in range(steps):
            with dist_autograd.context() as context_id:
                loss = nn.functional.mse_loss(pipe(x), target)
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


def run(rank: int, store: str, steps: int) -> None:
    warnings.simplefilter("ignore")  # of torch's own: it scripts optimizers, and RPC has a process group of its own
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    name = "driver" if rank == 0 else WORKERS[rank - 1]
    rpc.init_rpc(name, rank=rank, world_size=len(WORKERS) + 1, rpc_backend_options=options)
    if rank == 0:
        train(steps)
    rpc.shutdown()  # workers serve until the driver has done


def main(steps: int = 20) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (os.path.join(folder, "store"), steps), nprocs=len(WORKERS) + 1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
