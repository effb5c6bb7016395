"""``colossal-hetero launch``: start the workers of one node, start failed ones again, leave no process behind."""
