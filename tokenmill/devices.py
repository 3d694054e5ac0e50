"""Which device is free: shards go to devices one at a time, whichever thread asks first.

One pool per process, so that two jobs of one process do not share a device either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition


class DevicePool:
    """Lends each device to one borrower at a time."""

    def __init__(self) -> None:
        self._lent: set[str] = set()
        self._returned = Condition()

    @contextmanager
    def borrow(self, devices: Sequence[str]) -> Iterator[str]:
        """The first of the devices that nobody has; waits for one.

        Example: of ("cuda:0", "cuda:1") while another thread has "cuda:0" -> "cuda:1"
        """
        with self._returned:
            self._returned.wait_for(lambda: any(device not in self._lent for device in devices))
            device = next(device for device in devices if device not in self._lent)
            self._lent.add(device)
        try:
            yield device
        finally:
            with self._returned:
                self._lent.remove(device)
                self._returned.notify_all()


DEVICES = DevicePool()
