"""Copies in host memory: what retracted requests held."""
