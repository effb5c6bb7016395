"""What each rank holds when a world ends, which state counts, and what moves where."""
