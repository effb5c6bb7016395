"""Find the best 3D plans: degrees, device groups, placement and bounds."""
