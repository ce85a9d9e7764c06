"""A model's card, the file `model.yaml` beside `model.pt`: all that one must know to apply the model."""
