"""Which of several replicas a request goes to: requests with the same prefix meet, without anybody being asked.

Router -> Route: a function of the prompt, the replicas and their queues ; `kvkeep.proxy` puts it before HTTP replicas.
"""

from kvkeep.routing.guard import Guard
from kvkeep.routing.router import Route, Router
from kvkeep.routing.settings import RoutingSettings

__all__ = ["Guard", "Route", "Router", "RoutingSettings"]
