"""The local critics strategy: layer groups update at once with the loss that critics predict."""
