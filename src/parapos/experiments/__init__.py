"""Grids of runs and their evaluations: sweeps, the paper's tables and figures, studies over seeds, the demo."""
