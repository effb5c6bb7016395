"""What the machines are that this runs on: devices, memory, speed, networks. Writes the cluster file."""
