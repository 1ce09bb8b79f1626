from __future__ import annotations

import asyncio

from gateway.background import Background


async def test_a_loop_that_crashes_is_told_of() -> None:
    told: list[int] = []
    background = Background(lambda: told.append(1))

    async def crash() -> None:
        raise RuntimeError("bug")

    background.run(crash, "crash")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (told, background.is_crashed) == ([1], True)
    await background.close()


async def test_a_loop_that_is_closed_did_not_crash() -> None:
    background = Background(lambda: None)
    background.run(asyncio.Event().wait, "for ever")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await background.close()
    assert not background.is_crashed


async def test_steps_are_finished_and_those_that_hang_given_up() -> None:
    background = Background(lambda: None)
    done: list[str] = []

    async def step(name: str, after: asyncio.Event | None = None) -> None:
        if after is not None:
            await after.wait()
        done.append(name)
        if name == "spawns":
            background.spawn(step("spawned"), "spawned")

    background.spawn(step("spawns"), "spawns")
    background.spawn(step("hangs", asyncio.Event()), "hangs")
    await background.finish_steps(0.05)
    assert (done, background.num_steps) == (["spawns", "spawned"], 0)


async def test_a_failing_step_is_its_callers() -> None:
    background = Background(lambda: None)

    async def fail() -> None:
        raise RuntimeError("expected")

    task = background.spawn(fail(), "fail")
    await asyncio.wait([task])
    assert isinstance(task.exception(), RuntimeError)
    assert not background.is_crashed
