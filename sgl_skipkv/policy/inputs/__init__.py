"""What a policy sees: a request's tokens, and what is known of the model."""
