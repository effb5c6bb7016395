"""ZeRO and plain data parallelism with a batch that fits each device."""
