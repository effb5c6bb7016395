"""Report: records, summaries, timelines and pictures of balanced iterations."""
