"""A reverse proxy before replicas that speak OpenAI's protocol, routed by prefix.

Proxy (an ASGI application) ; `kvkeep route` serves it.
"""

from kvkeep.proxy.app import Proxy

__all__ = ["Proxy"]
