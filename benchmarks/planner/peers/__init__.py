"""Runs the planners in a checkout of Sailor's repository: its own and its authors' ports of other planners."""
