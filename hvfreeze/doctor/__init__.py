"""`hvfreeze doctor`: checks whether a machine, or a list of hosts, can train."""
