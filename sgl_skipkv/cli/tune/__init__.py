"""``skipkv tune``: which policy and budget a user's own prompts bear."""
