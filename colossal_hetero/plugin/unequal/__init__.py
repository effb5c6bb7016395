"""Replicas of a model that are not alike: each a pipeline with its own depth, split and number of micro-batches."""
