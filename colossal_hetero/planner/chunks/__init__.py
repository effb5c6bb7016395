"""Plans of the interleaved and the zero-bubble schedule: their prediction, and the search for them."""
