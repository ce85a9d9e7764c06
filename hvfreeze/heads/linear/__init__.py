"""A linear head: multinomial logistic regression over all ranks."""
