"""The slots of a cluster: tensor-parallel groups, the links between them, and which of them form pipelines."""
