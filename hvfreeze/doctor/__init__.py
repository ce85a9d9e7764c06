"""`hvfreeze doctor`: what a machine, or a list of hosts, lacks."""
