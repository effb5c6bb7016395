import colossal_hetero.accelerator  # noqa: F401  (before the tests import Colossal-AI, whose import is noisy)
