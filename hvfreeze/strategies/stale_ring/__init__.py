"""The stale ring strategy: one model cut into K modules on a ring of K - 1 ranks, trained with delayed gradients."""
