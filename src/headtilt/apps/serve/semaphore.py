"""A semaphore with priorities: a few at a time, the lightest first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count


class PrioritySemaphore:
    """A semaphore: of those who wait for a place, the lightest goes first; of equals, who came first.

    What makes an image slow to decode takes bytes. So whoever sends costly files by the dozen waits behind all others.

    Args:
        places: How many may be taken at a time.
    """

    def __init__(self, places: int) -> None:
        self.free = places
        self._waiting: list[tuple[int, int, float, asyncio.Future[None]]] = []
        self._came = count()

    @asynccontextmanager
    async def acquired(self, weight: int) -> AsyncIterator[None]:
        """Wait for a place, and hold it for as long as the context lasts."""
        if self.free:
            self.free -= 1
        else:
            await self._place(weight)
        try:
            yield
        finally:
            self._leave()

    def waited(self) -> float:
        """Return for how many seconds the one who is next has waited; 0 where nobody waits."""
        self._drop()
        return asyncio.get_running_loop().time() - self._waiting[0][2] if self._waiting else 0.0

    async def _place(self, weight: int) -> None:
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        heappush(self._waiting, (weight, next(self._came), loop.time(), mine))
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # the place came at the very moment at which nobody wanted it any more
                self._leave()
            raise

    def _leave(self) -> None:
        self._drop()
        if self._waiting:
            heappop(self._waiting)[3].set_result(None)
        else:
            self.free += 1

    def _drop(self) -> None:
        """Forget those at the front who wait no longer."""
        while self._waiting and self._waiting[0][3].done():
            heappop(self._waiting)
