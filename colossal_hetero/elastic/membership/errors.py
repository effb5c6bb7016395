"""Errors after which no world can form. They are no ``RuntimeError``, which collectives raise when a world breaks."""

from __future__ import annotations

__all__ = ["JobEndedError", "JoinTimeoutError", "MembershipError", "StoreLostError"]


class MembershipError(Exception):
    """This process cannot be a member of a world."""


class StoreLostError(MembershipError):
    """The store does not answer, or was never there."""


class JoinTimeoutError(MembershipError):
    """No world formed within the limit."""


class JobEndedError(MembershipError):
    """The job has ended, so nobody can join it."""
