"""How a simulated world ends: nothing hangs, nothing leaks, and every page is free at last.

Must not choose what happened before.
"""

from tests.sim.world import World

#: Moves that one copy may take until it is reported, with those that pass.
MOVES_MAX = 16


def end(world: World) -> None:
    """Lets every request end, one way or another, and then everything that was copied or cached."""
    while world.device.finish_one():
        pass
    _waits_end(world)
    for handle in list(world.requests):
        request = world.requests[handle]
        if request.ticket is not None:
            world.do(("discard", handle))
        else:
            world.do(("finish" if handle % 2 else "abort", handle))
    for handle in list(world.outputs.live) if world.outputs is not None else ():
        world.do(("output", "release", handle))
    assert not world.requests and not world.cache.stats().leases
    _copies_end(world)
    stats = world.cache.stats()
    assert not stats.pages_live, f"{stats.pages_live} GPU pages are held by nobody who lives"
    assert stats.host_pages_total == stats.host_pages_free + stats.host_pages_cached
    world.do(("reset",))
    stats = world.cache.stats()
    assert (stats.pages_total, stats.host_pages_total) == (stats.pages_free, stats.host_pages_free)
    traffic = world.cache._traffic
    if traffic is not None:
        assert traffic.parking.ledger.total == traffic.parking.ledger.free
        assert not traffic.parking.suspended and not list(traffic.copies)


def _waits_end(world: World) -> None:
    """No lease waits for ever, not even for a copy that is stuck: its deadline comes."""
    if world.backend is None or world.manager is None:
        return
    for _ in range(world.setup.deadline_steps + 2 * _moves_left(world)):
        if not any(lease.read_in_progress for lease in world.leases()):
            return
        world.backend.step()
        world.do(("written",))
        world.do(("poll",))
        if not world.backend.movable:
            world.do(("late", world.setup.deadline_steps))
    raise AssertionError(f"still waiting: {[lease for lease in world.leases() if lease.read_in_progress]}")


def _copies_end(world: World) -> None:
    """Copies that were stuck go on, and then there are none."""
    if world.backend is None or world.manager is None:
        return
    for _ in range(_moves_left(world)):
        for job in world.backend.jobs:
            world.backend.free(job)
        world.backend.step()
        world.do(("written",))
        world.do(("poll",))
        if not world.manager.busy:
            return
    raise AssertionError(f"still copying: {world.manager.stats().queues}")


def _moves_left(world: World) -> int:
    """Moves within which every copy is over, and those that clean what is cached too."""
    assert world.manager is not None
    queues = world.manager.stats().queues
    return MOVES_MAX * (queues.loads + queues.stores + queues.in_flight + 2 * world.setup.pages + 4)
