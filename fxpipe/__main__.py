"""`python -m fxpipe`: prints versions and devices for bug reports."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata

from fxpipe import __version__

# Reported if installed.
OTHER_PACKAGES = ("numpy", "transformers", "accelerate", "peft", "lightning", "triton", "matplotlib")


def environment_text() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "fxpipe": f"{__version__} in {os.path.dirname(os.path.abspath(__file__))}",
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "CPU": f"{platform.machine()}, {cores} cores for this process",
        **_torch_facts(),
        **{name: version for name in OTHER_PACKAGES if (version := _version_of(name))},
    }
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {fact}" for name, fact in facts.items())


def _torch_facts() -> dict[str, str]:
    try:
        import torch

        from fxpipe._torch.versions import TESTED_VERSIONS
        from fxpipe.utils import accelerator
    except ImportError as error:  # a report may be about this
        return {"torch": f"cannot be imported: {' '.join(str(error).split())}"}
    devices = [f"{device} {accelerator.device_name(device) or ''}".strip() for device in accelerator.local_devices()]
    return {
        "torch": f"{torch.__version__}; tested are {TESTED_VERSIONS}",
        "threads": str(torch.get_num_threads()),
        "devices": ", ".join(devices) or "none beside the CPU",
    }


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    argparse.ArgumentParser("python -m fxpipe", description=__doc__).parse_args()
    print(environment_text())
