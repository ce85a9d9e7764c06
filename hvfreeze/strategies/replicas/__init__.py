"""Plain data parallelism: what a step is (`door`), and what it is built from (`opening`)."""
