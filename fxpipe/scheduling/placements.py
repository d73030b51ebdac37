"""Which device has which stage, where a device has several."""

from __future__ import annotations


def round_robin(devices: int, per_device: int) -> tuple[int, ...]:
    """Stage after stage in loops over the devices.

    >>> round_robin(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(devices)) * per_device


def there_and_back(devices: int, per_device: int) -> tuple[int, ...]:
    """Every other loop backwards, so that neighbours at the turn share a device.

    >>> there_and_back(3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    there = tuple(range(devices))
    return tuple(d for k in range(per_device) for d in (there[::-1] if k % 2 else there))
