"""Pipelines with unequal stages: the user's options, networks of process groups, and stage times against the plan."""
