"""The samples of a run: opened and compared on all ranks, their pixels shared by the ranks of a node."""
