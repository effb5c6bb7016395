"""Holmes' overlapped distributed optimizer, for ZeRO stages 1 and 2: it communicates while the model computes."""
