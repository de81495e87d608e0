"""What decode steps record for the next compaction: recent queries and sentence vectors."""
