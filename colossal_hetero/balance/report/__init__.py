"""Records, summaries, timelines and pictures of balanced iterations."""
