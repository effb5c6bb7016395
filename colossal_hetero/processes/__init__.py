"""Start ranks as processes on this machine, and run a function on every rank."""
