"""What a job achieves on average on nodes that are taken away and given back at random."""
