"""The explorer: a trace as one HTML page, written by ``skipkv view`` or served at ``/skipkv``."""
