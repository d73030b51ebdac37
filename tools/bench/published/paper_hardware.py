"""The devices that the papers ran on, by their data sheets, for the simulator.

What large operations reach of a peak is one guess for all models, so that it says nothing about any one of them:
three quarters of the arithmetic and four fifths of the memory, as libraries of that time did.
"""

from __future__ import annotations

from fxpipe.cluster import Link
from fxpipe.hardware import GiB, Hardware

_REACHED = {"arithmetic_efficiency": 0.75, "memory_efficiency": 0.8}
_LAUNCH = 1e-5  # seconds from one operation to the next, called from Python

# NVIDIA Tesla P40 data sheet: 11.76 TFLOP/s at boost clock, GDDR5 of 346 GB/s, 24 GB of which CUDA gives 22.4 GiB. PCI
# Express 3.0 x16, of which copies between GPUs have 10 of 16 GB/s.
P40 = Hardware(
    "Tesla P40", {"float32": 11.76e12}, 346e9, int(22.4 * GiB), Link(10e9, 1e-5), None, **_REACHED, launch=_LAUNCH
)

# NVIDIA V100 data sheet (SXM2, 16 GB): 15.7 TFLOP/s, 900 GB/s. Six NVLinks, of 25 GB/s each, in a node.
V100 = Hardware(
    "Tesla V100", {"float32": 15.7e12}, 900e9, int(15.8 * GiB), Link(120e9, 1e-5), None, **_REACHED, launch=_LAUNCH
)

# One core of a Cloud TPU v3 (half a chip): 61.5 TFLOP/s in its matrix unit, 450 GB/s and 16 GB (cloud.google.com/tpu,
# "TPU v3"; N. Jouppi et al., CACM 63/7, 2020). A link between chips carries 656 Gbit/s. XLA compiles a step as a whole.
TPU_V3 = Hardware(
    "Cloud TPU v3 core", {"float32": 61.5e12}, 450e9, 16 * GiB, Link(70e9, 5e-6), None, **_REACHED, launch=1e-6
)
