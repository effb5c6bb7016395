"""Before a process is a member: it waits for the others, measures its device, and all wait until a plan fits."""
