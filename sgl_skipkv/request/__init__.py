"""One request: its settings, state, summary and trace."""
