"""Dividing global batches again while training: from measured times of replicas to another division. All is pure."""
