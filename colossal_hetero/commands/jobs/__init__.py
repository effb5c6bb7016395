"""Commands around a training job: its processes, their store, its checkpoints."""
