"""The life of a budgeted request: plan a compaction, rewrite its row, free slots."""
