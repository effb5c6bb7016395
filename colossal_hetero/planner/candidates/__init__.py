"""Candidates of the search: pipelines of given slots, cut into stages, with their predicted times."""
