"""Training: recipes, the engine that runs them, and checkpoints to go on from. Lightning is imported here only."""
