"""What `analysis.peers` and what follows it is made of."""
