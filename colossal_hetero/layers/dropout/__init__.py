"""Dropout whose masks do not depend on which rank computes what."""
