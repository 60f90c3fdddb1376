"""What `remat.py` compares: models, known rules for what is kept, and steps that run."""
