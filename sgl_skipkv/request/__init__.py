"""What one request asked for, and what is known of it."""
