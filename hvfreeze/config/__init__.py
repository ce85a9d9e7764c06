"""The configuration of a run: the tree of all sections, and the command line and YAML files that fill it. No torch.

Imports `errors`, `rules`, `section`, the settings of every folder, `user_code`, `plain_yaml` and `wording`.
"""
