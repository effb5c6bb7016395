"""What a job achieves while devices come and go as a recorded trace says. Simulated, without torch or devices."""
