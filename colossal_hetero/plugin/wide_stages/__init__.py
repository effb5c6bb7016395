"""Stages of several tensor-parallel groups, which divide the samples of each micro-batch."""
