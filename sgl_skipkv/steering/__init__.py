"""Adaptive steering: the vector, its strength, and the statistics that it is computed from."""
