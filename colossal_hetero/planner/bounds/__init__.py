"""How fast a plan can be at most: lower bounds on the time of pipelines, of sums of gradients, and of all plans."""
