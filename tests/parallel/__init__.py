import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (before the tests import Colossal-AI, whose import is noisy)
