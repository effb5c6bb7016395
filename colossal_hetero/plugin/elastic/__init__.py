"""The hybrid plugin, its model and optimizer made again for another plan, while the script keeps its objects."""
