"""What a finished request leaves for the next turn of its conversation."""
