"""``skipkv tune``: the least KV that keeps accuracy on a user's own prompts."""
