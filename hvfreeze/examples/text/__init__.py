"""A transformer on short reviews three times: in Horovod alone, with blocks frozen by vote, and with a cache."""
