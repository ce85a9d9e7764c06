"""A torchvision classifier on digits three times: in Horovod alone, with blocks frozen by vote, and with a cache."""
