"""What policies see: tokens of one request or of several, and what is known of the model."""
