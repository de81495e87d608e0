"""Backups of retracted requests in host memory."""
