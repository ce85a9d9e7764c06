"""Training scripts in plain Horovod, and what changes in them: blocks frozen by vote, their output cached."""
