"""What `remat.py` compares: models, known rules for what to keep, and steps that run."""
