"""Assign ranks to places in the parallel layout, and price the communication of a layout."""
