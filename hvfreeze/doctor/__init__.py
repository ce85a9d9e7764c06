"""What a machine, or a list of hosts, lacks. Imports nothing of hvfreeze but `errors` and `torchvision_shim`."""
