"""Assign ranks to places in the parallel layout, and predict the communication time of a layout."""
