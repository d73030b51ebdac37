"""Mixed precision and compiled stages, in the training loop of the GPT of examples/gpt.py.

    python examples/precision_and_compile.py --amp bfloat16          autocast
    python examples/precision_and_compile.py --amp float16           autocast, and a GradScaler
    python examples/precision_and_compile.py --compile inductor      each stage compiled by torch.compile, in its worker
    python examples/precision_and_compile.py --amp bfloat16 --compile inductor --devices cuda:0,cuda:1

Use autocast around the step, as around any model; it applies in the stages. Pass the scaler to `forward_backward`,
which scales the loss and never the gradients; `scaler.step` and `scaler.update` work as usual. The script prints the
losses, the plain model's losses in single precision, and the time of a step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from gpt import loss_fn, make_model, read_text, sample_lines
from tabulate import tabulate

import fxpipe

DTYPES = {"no": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCES = {"no": 1e-3, "bfloat16": 0.05, "float16": 0.05}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--amp", choices=DTYPES, default="bfloat16", help="of autocast (default: bfloat16)")
    parser.add_argument("--compile", metavar="BACKEND", help="of torch.compile: inductor, aot_eager (default: none)")
    parser.add_argument("--devices", default="cpu,cpu", help="a device for each stage, with commas (default: cpu,cpu)")
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a mini-batch (default: 4)")
    parser.add_argument("--steps", type=int, default=8, help="training steps (default: 8)")
    options = parser.parse_args()
    devices, dtype = options.devices.split(","), DTYPES[options.amp]
    kind = torch.device(devices[0]).type

    torch.manual_seed(0)
    text, generator = read_text(), torch.Generator().manual_seed(0)
    tokens, following = sample_lines(text, generator)
    model = make_model()
    plain = copy.deepcopy(model).to(devices[0])
    with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):  # planned as it will run
        compiling = {"backend": options.compile} if options.compile else False
        pipe = fxpipe.pipeline(model, devices, options.chunks, compile=compiling, example_args=(tokens,))
    print(f"{pipe.plan}\n")

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(kind, enabled=dtype is torch.float16)
    rows, seconds = [], []
    for step in range(options.steps):
        tokens, following = sample_lines(text, generator)
        begin = time.perf_counter()
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            loss = pipe.forward_backward(tokens, target=following, loss_fn=loss_fn, grad_scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        value = loss.item()
        seconds.append(time.perf_counter() - begin)

        plain_loss = loss_fn(plain(tokens.to(devices[0])), following.to(devices[0]))
        plain_loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        rows.append((step, value, plain_loss.item()))
    print(tabulate(rows, headers=("step", f"loss, {options.amp}", "loss, plain"), floatfmt=".6f"))
    first, later = seconds[0], statistics.median(seconds[1:] or seconds)
    print(f"first step {first:.2f} s, later ones {later:.3f} s (median)")
    difference = max(abs(a - b) for _, a, b in rows)
    print(f"largest difference: {difference:.1e}")
    assert difference < TOLERANCES[options.amp], "it does not train as the plain model does"
    pipe.close()


if __name__ == "__main__":
    main()
