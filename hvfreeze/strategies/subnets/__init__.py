"""Independent Subnet Training: the hidden neurons of an MLP are dealt to the ranks anew in each round."""
