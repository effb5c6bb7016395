"""The subcommands of ``colossal-hetero``, one a file. Their heavy imports happen when they run."""
