"""One line of a grid: how a batch goes through the partitions in micro-batches."""
