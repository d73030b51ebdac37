"""Hardware figures: the rates and sizes of devices, from data sheets or measured on local devices.

    fxpipe.plan(model, 8, example_args=(x,), hardware="h100")
    HARDWARE["h100"]                                    # the figures of this name
    replace(HARDWARE["h100"], devices_per_node=4)       # a variant: `dataclasses.replace`
    replace(HARDWARE["h100"], nodes=16)                 # a cluster, see `fxpipe.cluster`
    Hardware("mine", {"float32": 20e12}, 1e12, memory=24 * 2**30, within=None, between=Link(12e9))

Peaks are the maker's, without sparsity; the share of a peak that large operations reach is a separate figure. Sizes are
bytes, and rates are per second, for one direction of a link.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING

from fxpipe.cluster import MESHES, Cluster, Link
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.utils.polynomial import ZERO, Polynomial
from fxpipe.utils.units import count_text, did_you_mean, with_article

if TYPE_CHECKING:
    import torch


GiB = 2**30
MEMORY_MARGIN = 0.06  # share of a device's memory: fragmentation, memory of libraries, uncounted memory


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device type and the links between its devices. Checked on construction.

    Raises:
        ArgumentError: a figure is not a finite number above 0, or the rate for float32 is missing.
    """

    name: str
    flops_per_second: Mapping[str, float] = field(hash=False)  # peak by dtype ("float32", "bfloat16", "tfloat32", ...)
    bytes_per_second: float  # peak, of its memory
    memory: int  # bytes available to a program
    within: Link | None  # between two devices of a node; None: values are passed by reference, at no cost
    between: Link | None  # between devices of two nodes, over a network adapter at each end; None: no link
    devices_per_node: int = 8
    adapters_per_node: int | None = None  # shared evenly by the node's devices; None: one for each device
    arithmetic_efficiency: float = 1.0  # share of the peak that large matrix products reach
    memory_efficiency: float = 1.0  # share of the memory's peak that large operations reach
    launch: float = 0.0  # seconds: no operation takes less
    nodes: int | None = None  # number of nodes of a cluster; None: any

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops_per_second", dict(self.flops_per_second))  # a private copy, which pickles
        if "float32" not in self.flops_per_second:
            raise ArgumentError(
                f"Hardware {self.name!r} has rates for {', '.join(self.flops_per_second) or 'nothing'}; give one for "
                "'float32' at least: it also holds for types without one"
            )
        for dtype, rate in self.flops_per_second.items():
            self._check(f"flops_per_second[{dtype!r}]", rate)
        for key in ("bytes_per_second", "memory", "arithmetic_efficiency", "memory_efficiency"):
            self._check(key, getattr(self, key))
        for key in ("devices_per_node", "adapters_per_node", "nodes"):
            count = getattr(self, key)
            if count is not None or key == "devices_per_node":
                self._check(key, count)
                if not isinstance(count, int):
                    raise ArgumentError(f"Hardware {self.name!r}: {key}={count!r}; expected a whole number")
        for name, link in (("within", self.within), ("between", self.between)):
            if link is not None:
                self._check(f"{name}.bytes_per_second", link.bytes_per_second)
                self._check(f"{name}.latency", link.latency, may_be_zero=True)
        self._check("launch", self.launch, may_be_zero=True)
        if max(self.arithmetic_efficiency, self.memory_efficiency) > 1:
            raise ArgumentError(f"Hardware {self.name!r}: an efficiency is a share of the peak, at most 1")

    def _check(self, key: str, figure: float, may_be_zero: bool = False) -> None:
        is_number = isinstance(figure, (int, float)) and math.isfinite(figure)
        if not is_number or figure < 0 or (figure == 0 and not may_be_zero):
            least = "0 or more" if may_be_zero else "above 0"
            raise ArgumentError(f"Hardware {self.name!r}: {key}={figure!r}; expected a finite number {least}")

    @property
    def devices(self) -> int | None:
        """The number of devices of a cluster; None: any."""
        return None if self.nodes is None else self.nodes * self.devices_per_node

    @property
    def most_devices(self) -> int | None:
        """The largest number of devices of a pipeline: a node's devices without a network. None: any."""
        return self.devices_per_node if self.between is None else self.devices

    @property
    def usable_memory(self) -> int:
        return int(self.memory * (1 - MEMORY_MARGIN))

    def update_seconds(self, gradient_bytes: float, optimizer_bytes: float) -> float:
        """Estimates an update's seconds: reading parameters, gradients and state, writing parameters and state."""
        return (3 * gradient_bytes + 2 * optimizer_bytes) / (self.bytes_per_second * self.memory_efficiency)

    def seconds(self, flops: float, dtype: str, moved: float) -> float:
        """Estimates an operation's seconds: the longest of arithmetic in `dtype`, moving `moved` bytes, and launch."""
        rate = self.flops_per_second.get(dtype, self.flops_per_second["float32"])
        arithmetic = flops / (rate * self.arithmetic_efficiency)
        return max(arithmetic, moved / (self.bytes_per_second * self.memory_efficiency), self.launch)


# -- Devices known by name ---------------------------------------------------------------------------------------------

# Efficiencies: matrix products in bfloat16 reach 267.9 of 312 TFLOP/s (A100 SXM) and 792.1 of 989 (H100 SXM),
# S. Bekman, Machine Learning Engineering Open Book, "Maximum Achievable Matmul FLOPS comparison table",
# github.com/stas00/ml-engineering. Copies by torch within an H200 move 4.3 of 4.8 TB/s.
#
# Launch: an operation takes at least 3.8 microseconds, A. Gray, Getting started with CUDA graphs, NVIDIA technical
# blog, 2019.
#
# Links: NCCL assumes 20.0 of the 25 GB/s of each NVLink of an A100 and 20.6 on Hopper (src/graph/topo.h). Latencies are
# 8.4 + 3.4 microseconds over NVLink and 8.4 + 14 over a network (ring, simple protocol; src/graph/tuning.cc). A node is
# a DGX or HGX: eight GPUs, and a network adapter for each.

_NVLINK_LATENCY = 11.8e-6
_NETWORK_LATENCY = 22.4e-6

_CPU = Hardware(
    "Intel Xeon Platinum 8380, one socket",
    # Intel's product page: 40 cores at 2.3 GHz, two AVX-512 units each, so 64 float32 operations per cycle. 16-bit
    # types are slower: the factors are the measured ratios to float32 in torch 2.13 on a core of this generation.
    {"float64": 2.94e12, "float32": 5.89e12, "bfloat16": 0.19 * 5.89e12, "float16": 0.011 * 5.89e12},
    204.8e9,  # eight channels of DDR4-3200
    memory=256 * GiB,  # eight modules of 32 GiB, an assumption
    within=None,  # workers of one process
    between=Link(25e9, _NETWORK_LATENCY),  # InfiniBand HDR
    devices_per_node=2,
    adapters_per_node=1,
    arithmetic_efficiency=0.8,  # 132 of 160 GFLOP/s: a 2048 x 2048 product in torch 2.13, on one core at 2.5 GHz
    memory_efficiency=0.8,  # an estimate
    launch=5e-6,  # torch 2.13 called from Python: an addition of two numbers
)

# Cards: TFLOP/s without sparsity, GB/s, and the GiB that the driver reports. Efficiencies without a source are
# estimates. NCCL assumes 12 GB/s for PCI 3.0 x16, twice that for 4.0, and a latency of 8.4 + 5.7 microseconds
# (src/graph/topo.h, tuning.cc). Unless a comment says otherwise, a node has eight cards and one adapter of 100 Gb/s;
# for another network use `dataclasses.replace`.

_PCI_4 = Link(24e9, 14.1e-6)
_ETHERNET = Link(12.5e9, _NETWORK_LATENCY)


def _card(
    name: str, peaks: Mapping[str, float], rate: float, memory: int, within: Link = _PCI_4, between: Link = _ETHERNET,
    adapters: int | None = 1, efficiency: float = 0.8,
) -> Hardware:  # fmt: skip
    """Returns the hardware of a card from peaks in TFLOP/s by dtype, and GB/s and GiB of its memory."""
    return Hardware(
        name,
        {dtype: peak * 1e12 for dtype, peak in peaks.items()},
        rate * 1e9,
        memory=memory * GiB,
        within=within,
        between=between,
        adapters_per_node=adapters,
        arithmetic_efficiency=efficiency,
        memory_efficiency=0.9,
        launch=3.8e-6,
    )


def _peaks(float32: float, tfloat32: float, float16: float, **others: float) -> dict[str, float]:
    return {"float32": float32, "tfloat32": tfloat32, "bfloat16": float16, "float16": float16, **others}


_HOPPER = {  # half of the data sheets' figures, which are with sparsity
    "float64": 67, "float32": 67, "tfloat32": 494.7, "bfloat16": 989.4, "float16": 989.4, "float8_e4m3fn": 1978.9,
    "float8_e5m2": 1978.9, "int8": 1978.9,
}  # fmt: skip
_HOPPER_LINKS = Link(18 * 20.6e9, _NVLINK_LATENCY), Link(50e9, _NETWORK_LATENCY), None

_CARDS = {
    # NVIDIA A100 Tensor Core GPU data sheet (A100 80GB SXM), except efficiency and launch: 80 GB (79.1 GiB in CUDA), 12
    # NVLinks of the third generation (600 GB/s in both directions together). DGX A100 data sheet: InfiniBand HDR.
    "a100-80gb": _card(
        "NVIDIA A100 80GB", _peaks(19.5, 156, 312, float64=19.5, int8=624), 2039, 79,
        Link(12 * 20.0e9, _NVLINK_LATENCY), Link(25e9, _NETWORK_LATENCY), None, efficiency=0.86,
    ),
    # NVIDIA H100 Tensor Core GPU data sheet (SXM5): 80 GB (79.1 GiB in CUDA), 18 NVLinks of the fourth generation (900
    # GB/s in both directions together). DGX H100 data sheet: ConnectX-7, InfiniBand NDR, 400 Gb/s.
    "h100": _card("NVIDIA H100 SXM", _HOPPER, 3350, 79, *_HOPPER_LINKS),
    # NVIDIA H200 Tensor Core GPU data sheet (SXM): arithmetic and links of the H100, 141 GB (139 GiB in CUDA).
    "h200": _card("NVIDIA H200 SXM", _HOPPER, 4800, 139, *_HOPPER_LINKS),
    # V100 data sheet (SXM2 32GB). A pair of a DGX-1 has one NVLink (20 GB/s in NCCL) or two; four InfiniBand EDR.
    "v100": _card(
        "NVIDIA V100 SXM2 32GB", {"float64": 7.8, "float32": 15.7, "float16": 125}, 900, 31,
        Link(20e9, _NVLINK_LATENCY), adapters=4,
    ),
    # A10G data sheet of AWS.
    "a10g": _card("NVIDIA A10G", _peaks(35, 35, 70, int8=140), 600, 22),
    # RTX A6000 data sheet; Ampere GA102 white paper, appendix A.
    "a6000": _card("NVIDIA RTX A6000", _peaks(38.7, 77.4, 154.8, int8=309.7), 768, 47),
    "3090": _card("NVIDIA GeForce RTX 3090", _peaks(35.6, 35.6, 71, int8=284), 936, 23),
    # Ada white paper, appendix A (sums in float32), and L40S data sheet.
    "4090": _card("NVIDIA GeForce RTX 4090", _peaks(82.6, 82.6, 165.2, float8_e4m3fn=330.3, int8=660.6), 1008, 23),
    "l40s": _card("NVIDIA L40S", _peaks(91.6, 183, 362, float8_e4m3fn=733, int8=733), 864, 44),
    # Blackwell RTX white paper, appendix A (sums in float32); PCI 5.0.
    "5090": _card(
        "NVIDIA GeForce RTX 5090", _peaks(104.8, 104.8, 209.5, float8_e4m3fn=419, int8=838), 1792, 31,
        Link(48e9, 14.1e-6),
    ),
    # HGX B200 data sheet, an eighth of it; 18 NVLinks of the fifth generation (40.1 GB/s each in NCCL); ConnectX-7.
    "b200": _card(
        "NVIDIA B200 SXM", _peaks(75, 1125, 2250, float64=37, float8_e4m3fn=4500, int8=4500), 8000, 178,
        Link(18 * 40.1e9, _NVLINK_LATENCY), Link(50e9, _NETWORK_LATENCY), None,
    ),
    # MI300X data sheet: a link of 64 GB/s to each other card of the node. The network of a DGX H100.
    "mi300x": _card(
        "AMD Instinct MI300X",
        _peaks(163.4, 653.7, 1307.4, float64=81.7, float8_e4m3fnuz=2614.9, int8=2614.9), 5300, 191,
        Link(64e9, _NVLINK_LATENCY), Link(50e9, _NETWORK_LATENCY), None, efficiency=0.6,
    ),
}  # fmt: skip

HARDWARE: Mapping[str, Hardware] = MappingProxyType({**_CARDS, "cpu": _CPU})


def load_hardware(path: str | Path) -> Hardware:
    """Reads the figures of `Hardware` from a JSON file: an object with its fields, links as objects or null.

    Raises:
        ArgumentError: the file cannot be read, or lacks a figure.
    """
    try:
        fields = {"name": Path(path).stem, "within": None, "between": None, **json.loads(Path(path).read_text())}
        links = {name: Link(**fields[name]) for name in ("within", "between") if fields[name] is not None}
        return Hardware(**fields | links)
    except (OSError, TypeError, ValueError) as error:
        raise ArgumentError(f"{path}: is not a file of Hardware(...) of fxpipe.hardware as JSON: {error}") from None


def parse_hardware(hardware: str | Hardware) -> Hardware:
    """Returns the hardware of a name in `HARDWARE`, or the `Hardware` itself.

    Raises:
        ArgumentError: the name is unknown.
        ArgumentTypeError: `hardware` is neither a name nor a `Hardware`.
    """
    if isinstance(hardware, Hardware):
        return hardware
    accepted = f"{', '.join(map(repr, HARDWARE))}, or your own as Hardware(...) of fxpipe.hardware"
    if not isinstance(hardware, str):
        raise ArgumentTypeError(f"hardware={hardware!r} is {with_article(hardware)}; expected {accepted}")
    if hardware.lower() not in HARDWARE:
        raise ArgumentError(f"hardware={hardware!r} is unknown; there are {accepted}{did_you_mean(hardware, HARDWARE)}")
    return HARDWARE[hardware.lower()]


def cluster_of(
    hardware: Hardware, pipe: int, data: int = 1, mesh: tuple[str, str] = MESHES[0], replicas: tuple[int, ...] = ()
) -> Cluster:
    """Returns the cluster of `data` replicas of a pipeline of `pipe` devices, or of `replicas` of each device."""
    size = hardware.devices_per_node
    adapters = min(size, hardware.adapters_per_node or size)
    return Cluster(size, adapters, hardware.within, hardware.between, pipe, data, mesh, replicas)


def check_device_count(hardware: Hardware | None, pipe: int, data: int) -> None:
    """Checks that all replicas together use all devices of the cluster, if it has a number of nodes.

    Raises:
        ArgumentError: they do not; or there are replicas and no hardware, so their links are unknown.
    """
    if hardware is None:
        if data > 1:
            raise ArgumentError(
                f"data_parallel={data} without hardware: the links between replicas are not known; give hardware, as "
                "in hardware='h100'"
            )
        return
    count = pipe * data
    if hardware.devices is not None and count != hardware.devices:
        many = f"{pipe} x {data} = {count}" if data > 1 else str(count)
        raise ArgumentError(
            f"devices: {many}, but hardware {hardware.name!r} is a cluster of {count_text(hardware.nodes or 1, 'node')}"
            f" with {count_text(hardware.devices_per_node, 'device')} each: give {hardware.devices}"
        )
    cluster_of(hardware, pipe, data)


MOST_DEVICES = 128  # torch has no larger device index


def planned_devices(count: int | None, hardware: Hardware | None) -> list[str] | int | None:
    """Returns names of devices of hardware, by default all of a cluster. Without hardware: the number of devices."""
    if count is None:
        return None if hardware is None or hardware.devices is None else device_names(hardware, hardware.devices)
    return count if hardware is None else device_names(hardware, count)


def device_names(hardware: Hardware, count: int) -> list[str]:
    """Returns the names of `count` GPUs or CPU workers, which need not be local; in a cluster, by index in a node."""
    if hardware.within is None:
        return ["cpu"] * count
    size = hardware.devices_per_node if hardware.nodes is not None or count > MOST_DEVICES else count
    return [f"cuda:{k % size}" for k in range(count)]


# -- Local devices -----------------------------------------------------------------------------------------------------

_SMALL_COPY, _LARGE_COPY = 2**12, 2**26  # bytes of the two copies that measure a link
_COPIES = 7


def local_link(a: torch.device, b: torch.device) -> Link | None:
    """Measures, once, the link between two devices of this machine; None if they are the same device."""
    from fxpipe.utils import accelerator

    a, b = accelerator.with_index(a), accelerator.with_index(b)
    return None if a == b else _measure_link(a, b)


def local_memory(device: torch.device) -> int | None:
    """Returns the bytes of a device available for further tensors of this process; None for the CPU, or if unknown."""
    from fxpipe.utils import accelerator

    figures = accelerator.memory_figures(accelerator.with_index(device))
    return None if figures is None else figures.available


def fit_link(small: float, large: float) -> Link:
    """Returns the link over which copies of `_SMALL_COPY` and `_LARGE_COPY` bytes take these seconds."""
    if large <= small:  # noise
        return Link(_LARGE_COPY / large)
    rate = (_LARGE_COPY - _SMALL_COPY) / (large - small)
    return Link(rate, max(0.0, small - _SMALL_COPY / rate))


@functools.cache
def _measure_link(a: torch.device, b: torch.device) -> Link:
    import torch

    from fxpipe.utils import accelerator

    def copy_seconds(size: int) -> float:
        source = torch.zeros(size, dtype=torch.uint8, device=a)
        seconds = []
        for _ in range(_COPIES):
            accelerator.synchronize(a, b)
            start = time.perf_counter()
            # As between stages: through pinned memory, from and to a CPU.
            accelerator.copy_to(accelerator.pinned(source) if a.type == "cpu" else source, b)
            accelerator.synchronize(a, b)
            seconds.append(time.perf_counter() - start)
        return median(seconds[1:])  # the first copy is a warm-up

    return fit_link(copy_seconds(_SMALL_COPY), copy_seconds(_LARGE_COPY))


# The work of nodes, independent of hardware: operations with their arithmetic and memory traffic as formulas in the
# micro-batch size. `Hardware.seconds` turns them into seconds of any hardware.


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a kernel."""

    dtype: str  # name of the type in which it computes; "" if it only moves data
    flops: Polynomial
    moved: Polynomial  # bytes read and written

    def seconds(self, hardware: Hardware, sizes: Mapping[str, int]) -> float:
        """Returns the seconds for sizes by name, including the number of samples `b`."""
        return hardware.seconds(self.flops.at(sizes), self.dtype, self.moved.at(sizes))

    def growing(self, hardware: Hardware, sizes: Mapping[str, int]) -> Polynomial:
        """Returns the part of the seconds that grows with the sizes: all, or nothing if launch takes longest."""
        seconds = self.seconds(hardware, sizes)
        if seconds <= hardware.launch:
            return ZERO
        is_arithmetic = hardware.seconds(self.flops.at(sizes), self.dtype, 0) == seconds
        formula = self.flops if is_arithmetic else self.moved
        return formula * Fraction(seconds / formula.at(sizes))


@dataclass(frozen=True, slots=True)
class NodeWork:
    """The operations of a node, in order."""

    forward: tuple[Operation, ...] = ()
    backward: tuple[Operation, ...] = ()
    to_inputs: tuple[Operation, ...] = ()  # the backward if no parameter had a gradient

    def seconds(self, hardware: Hardware, sizes: Mapping[str, int]) -> tuple[float, float, float]:
        """Returns the seconds of `forward`, `backward` and `to_inputs` for sizes by name."""
        forward, backward, to_inputs = (
            math.fsum(one.seconds(hardware, sizes) for one in run)
            for run in (self.forward, self.backward, self.to_inputs)
        )
        return forward, backward, to_inputs
