"""What a given plan or layout takes on a given cluster: which devices run it, time, memory and price."""
