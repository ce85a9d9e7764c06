"""The run directory: the files of a run, how they are written safely, and how they are read again."""
