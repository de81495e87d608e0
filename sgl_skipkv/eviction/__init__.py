"""The life of a budgeted request: plan a compaction, rewrite its row, give slots back."""
