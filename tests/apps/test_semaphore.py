"""Who is next in the service."""

from __future__ import annotations

import asyncio

import pytest

from headtilt.apps.serve.semaphore import PrioritySemaphore


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


def test_of_those_who_wait_the_lightest_goes_first_and_of_equals_who_came_first():
    async def story():
        places, order, doors = PrioritySemaphore(2), [], asyncio.Event()

        async def one(name, weight):
            async with places.acquired(weight):
                order.append(name)
                await doors.wait()

        tasks = []
        for name, weight in (("a", 9), ("b", 9), ("heavy", 500), ("light", 1), ("first", 7), ("second", 7)):
            tasks.append(asyncio.ensure_future(one(name, weight)))
            await asyncio.sleep(0)
        await settled()
        assert order == ["a", "b"]
        doors.set()
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "light", "first", "second", "heavy"]
        assert (places.free, places.waited()) == (2, 0.0)

    asyncio.run(story())


def test_who_gives_up_takes_no_place_with_them():
    async def story():
        places = PrioritySemaphore(1)
        held = places.acquired(1)
        await held.__aenter__()
        patient, hasty = (asyncio.ensure_future(places.acquired(weight).__aenter__()) for weight in (5, 2))
        await settled()
        hasty.cancel()
        await settled()
        assert hasty.cancelled()
        assert places.waited() > 0
        await held.__aexit__(None, None, None)  # gives the place to the patient one
        patient.cancel()  # at the very moment at which it comes
        await asyncio.gather(patient, return_exceptions=True)
        assert (places.free, places.waited()) == (1, 0.0)

    asyncio.run(story())


def test_an_error_inside_frees_the_place():
    async def story():
        places = PrioritySemaphore(1)
        for _ in range(3):
            with pytest.raises(ValueError, match="inside"):
                async with places.acquired(1):
                    raise ValueError("inside")
        assert places.free == 1

    asyncio.run(story())
