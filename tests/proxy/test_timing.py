"""What the proxy costs, in real processes.  The bench judges more, and for longer: `kvkeep bench routing`."""

import pytest

from bench._measure import SPIN_QUIET_US
from bench._proxied import measure_proxy
from kvkeep.benching import spin_us

pytestmark = pytest.mark.timing


def test_the_proxy_adds_little():
    """At most 1 ms on a quiet machine; streams come piece by piece; at 500 requests a second nothing is lost.

    Held against the faster tenth of requests: where other programs want the cores, the rest waits for them.
    """
    spin = spin_us().value
    assert spin is not None
    measured = measure_proxy(pairs=300, seconds=2.0)
    direct, proxied = (sorted(samples)[len(samples) // 10] for samples in (measured.direct, measured.proxied))
    assert proxied - direct <= max(1.0, spin / SPIN_QUIET_US)
    assert 10.0 > min(measured.pieces)
    assert 0 == measured.failures and 1_000 == len(measured.offered)
