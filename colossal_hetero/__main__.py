"""``python -m colossal_hetero`` is the command ``colossal-hetero``."""

from .cli.main import main

if __name__ == "__main__":
    main(prog_name="python -m colossal_hetero")
