"""A world of processes that forms, breaks, and forms again in the same processes."""

from .errors import JobEndedError, JoinTimeoutError, MembershipError, StoreLostError
from .membership import Membership
from .timing import MembershipTiming
from .world import Failure, Formation, World

__all__ = [
    "Failure",
    "Formation",
    "JobEndedError",
    "JoinTimeoutError",
    "Membership",
    "MembershipError",
    "MembershipTiming",
    "StoreLostError",
    "World",
]
