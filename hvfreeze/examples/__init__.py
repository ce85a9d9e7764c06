"""The same training script twice: in plain Horovod, and with blocks frozen by vote."""
