"""One file per way to run a graph; base.py says what a backend is."""
