"""How the reference model is trained: the curriculum, its rows, the optimiser, one run."""
