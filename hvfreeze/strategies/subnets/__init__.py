"""Independent Subnet Training: the hidden neurons of an MLP are redistributed to the ranks in each round."""
