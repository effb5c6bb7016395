"""The machines: devices, nodes, links and networks, and the time of an all-reduce over them."""
